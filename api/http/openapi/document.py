"""Assemble the OpenAPI document from the gateway's routes and the operation table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from starlette.routing import BaseRoute, Route

from cellama.api.anthropic.shapes import AnthropicError
from cellama.api.http.errors import GATEWAY_CODES
from cellama.api.http.files.endpoints import PURPOSE
from cellama.api.http.keys.access import RATE_HEADER_NAMES
from cellama.api.http.middleware import REQUEST_ID
from cellama.api.http.parsing import MAX_KEY_CHARS
from cellama.api.http.running import WARNINGS
from cellama.tasks.contract.codes import CODES

from .failures import ErrorStyle, RequestFailure, description_of, failures_of
from .operations import OPERATIONS, Events, Operation
from .schemas import Schemas
from .shapes import ErrorBody

CONSOLE = "/console"
OLLAMA = "/api/"  # other projects document Ollama's API
DESCRIPTION = """\
The gateway implements OpenAI's and Anthropic's APIs. Each request becomes a job in the queue.

Send an API key as `Authorization: Bearer …` or as `x-api-key`. While no API key exists, the gateway accepts requests \
from its own machine without a key.

An optional parameter may be null, which means that it is not set. If the media type of an answer is \
`text/event-stream`, its schema describes each event.

Ollama's API below `/api/` and the pages of the console for browsers are not part of this document.
"""
SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"apiKey": []}]
METRICS_SECURITY: list[dict[str, list[str]]] = [{}, {"metricsToken": []}]
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "An API key."},
    "metricsToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "The value of the setting `gateway_metrics_token`. API keys don't give access to the metrics.",
    },
}
RETRIED = frozenset(row.http_status for row in (*GATEWAY_CODES.values(), *CODES.values()) if row.retryable)
HEADERS: dict[str, Any] = {
    REQUEST_ID: {"description": "The id that the client sent, or a new one.", "schema": {"type": "string"}},
    "retry-after": {
        "description": "Seconds after which a retry is likely to succeed.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "retry-after-ms": {
        "description": "The same time in milliseconds, which OpenAI's and Anthropic's clients prefer.",
        "schema": {"type": "integer", "minimum": 1},
    },
    WARNINGS: {
        "description": "Keywords of a schema that are not enforced, as a JSON list.",
        "schema": {"type": "string"},
    },
    **{
        name: {"description": "A limit of the API key, and its use.", "schema": {"type": "string"}}
        for name in RATE_HEADER_NAMES
    },
}
IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "Requests with the same key and the same body get the answer of the same job.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
}
_CONVERTOR = re.compile(r"\{(\w+):\w+\}")  # Starlette's syntax for a parameter that may contain slashes
_PARAMETER = re.compile(r"\{(\w+)\}")


def gateway_document(routes: Iterable[BaseRoute], server: str = "/") -> dict[str, Any]:
    """Return the document for these routes, except for Ollama's API and the console's pages.

    `server` is the base URL of the gateway. Raises LookupError for a route or a parameter that the tables don't
    describe.
    """
    schemas, paths = Schemas(), dict[str, dict[str, Any]]()
    error_types: Mapping[ErrorStyle, Any] = {"openai": ErrorBody, "anthropic": AnthropicError}
    error_schemas = {style: schemas.of(error_type) for style, error_type in error_types.items()}
    for method, path, first_path in api_routes(routes):
        operation = OPERATIONS.get(f"{method} {first_path}")
        if operation is None:
            raise LookupError(f"{method} {path} is not in OPERATIONS (api/http/openapi/operations.py); add a row")
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, schemas, error_schemas)
    _add_links(paths)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "cellama gateway",
            "version": version("cellama"),
            "summary": "Open models as a job queue, with OpenAI's and Anthropic's APIs",
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": server}],
        "security": SECURITY,
        "tags": [{"name": tag} for tag in dict.fromkeys(one.tag for one in OPERATIONS.values())],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.components.items())),
            "headers": HEADERS,
            "securitySchemes": SCHEMES,
        },
    }


def api_routes(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str, str]]:
    """Yield each API route's method and path, and the first path of its endpoint.

    Routes with the same endpoint are aliases.
    """
    first_paths: dict[Any, str] = {}
    for route in routes:
        if not isinstance(route, Route) or route.path.startswith((CONSOLE, OLLAMA)):
            continue
        path = _CONVERTOR.sub(r"{\1}", route.path)
        first_path = first_paths.setdefault(route.endpoint, path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            yield method, path, first_path


def _add_links(paths: Mapping[str, Mapping[str, Any]]) -> None:
    """Link each operation that creates an object to the operations whose paths contain the object's id."""
    for path, methods in paths.items():
        links = {}
        for other, other_methods in paths.items():
            found = re.match(re.escape(path) + r"/\{(\w+)\}", other)
            for operation in other_methods.values() if found else ():
                parameters = {found[1]: "$response.body#/id"} if found else {}
                links[operation["operationId"]] = {"operationId": operation["operationId"], "parameters": parameters}
        if links and "post" in methods:
            methods["post"]["responses"]["200"]["links"] = links


def _operation(
    method: str, path: str, operation: Operation, schemas: Schemas, error_schemas: Mapping[ErrorStyle, Any]
) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(path)
    ]
    parameters += [_parameter("query", name, schema) for name, schema in operation.query.items()]
    parameters += [_parameter("header", name, schema) for name, schema in operation.headers.items()]
    if operation.is_idempotent:
        parameters.append(IDEMPOTENCY_KEY)
    body = _request_body(operation, schemas)
    security = METRICS_SECURITY if path == "/metrics" else []
    return {
        "operationId": f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_')}",
        "tags": [operation.tag],
        "summary": operation.summary,
        **({"parameters": parameters} if parameters else {}),
        **({"requestBody": body} if body else {}),
        **({"security": security} if operation.is_public else {}),
        "responses": {
            "200": _answer(operation, schemas, error_schemas),
            **({"303": {"description": f"See Other: {operation.redirect}."}} if operation.redirect else {}),
            **{
                str(status): _failure(status, failures, error_schemas)
                for status, failures in failures_of(operation.failures, operation.errors).items()
            },
        },
    }


def _parameter(place: str, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    about = {"description": schema["description"]} if "description" in schema else {}
    return {
        "name": name,
        "in": place,
        **about,
        "schema": {key: value for key, value in schema.items() if key != "description"},
    }


def _request_body(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    if operation.form:
        return {"required": True, "content": {"multipart/form-data": {"schema": _form(operation.form)}}}
    if operation.body is None:
        return {}
    tables = operation.body if isinstance(operation.body, tuple) else (operation.body,)
    bodies = [schemas.body(table) for table in tables]
    examples = {name: {"value": value} for name, value in operation.examples.items()}
    media_type = {"schema": bodies[0] if len(bodies) == 1 else {"anyOf": bodies}, "examples": examples}
    return {"required": True, "content": {"application/json": media_type}}


def _form(names: Iterable[str]) -> dict[str, Any]:
    """Return the schema of a form that contains a file."""
    known = {"purpose": {"const": PURPOSE}, "expires_after": {"type": "string", "description": "A JSON object."}}
    fields = {name: known.get(name, {"type": "string"}) for name in names}
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    return {
        "type": "object",
        "properties": {"file": file, **fields},
        "required": ["file", "purpose"],
        "additionalProperties": False,
    }


def _answer(operation: Operation, schemas: Schemas, error_schemas: Mapping[ErrorStyle, Any]) -> dict[str, Any]:
    names = [REQUEST_ID]
    if operation.body or operation.form:
        names += [WARNINGS, *RATE_HEADER_NAMES]
    content: dict[str, Any] = {}
    for media_type, shape in operation.answers.items():
        if isinstance(shape, Events):
            errors = [error_schemas[style] for style in operation.errors]
            schema = _event(schemas.of(shape.data), errors, has_end=shape.has_end)
            content[media_type] = {"schema": schema}
        else:
            content[media_type] = {} if shape is None else {"schema": schemas.of(shape)}
    return {"description": "OK", "headers": _headers(names), "content": content}


def _event(data: dict[str, Any], errors: list[dict[str, Any]], *, has_end: bool) -> dict[str, Any]:
    """Return the schema of a stream's events. If a stream fails, its last event contains an error."""
    text = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [*data.get("anyOf", [data]), *errors]},
    }
    return {
        "type": "object",
        "properties": {
            "event": {"type": "string"},
            "data": {"anyOf": [{"const": "[DONE]"}, text]} if has_end else text,
        },
        "required": ["data"],
    }


def _failure(status: int, failures: list[RequestFailure], error_schemas: Mapping[ErrorStyle, Any]) -> dict[str, Any]:
    names = [REQUEST_ID, *(["retry-after", "retry-after-ms"] if status in RETRIED else [])]
    kinds = [error_schemas[style] for style in dict.fromkeys(one.style for one in failures)]
    examples = {f"{one.style}_{one.code or 'other'}": {"value": one.example} for one in failures}
    media_type = {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}, "examples": examples}
    return {
        "description": description_of(status, failures),
        "headers": _headers(names),
        "content": {"application/json": media_type},
    }


def _headers(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}

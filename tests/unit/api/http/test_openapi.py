"""Test that the OpenAPI document is valid and complete, and that its tables agree with the code of the gateway."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route
from typing_extensions import TypedDict

from cellama.api.http import create_app, errors
from cellama.api.http.app import API_ROUTES
from cellama.api.http.errors import GATEWAY_CODES, status_of_code
from cellama.api.http.openapi import api_routes, gateway_document
from cellama.api.http.openapi.operations import OPERATIONS
from cellama.api.http.openapi.schemas import BodyTable, Schemas
from cellama.api.openai.parameters import CHAT, ParameterRule
from cellama.config import Settings, limits
from cellama.tasks.contract.codes import CODES

HTTP = Path(errors.__file__).parent


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return gateway_document(API_ROUTES)


def operations_of(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_document_is_valid_openapi(document: dict[str, Any]) -> None:
    problems = [f"{list(error.path)}: {error.message}" for error in OpenAPIV31SpecValidator(document).iter_errors()]
    assert problems == []


def test_document_describes_all_routes_except_console_and_ollama_routes(document: dict[str, Any]) -> None:
    routes = [route for route in create_app(Settings(gateway_console="on")).routes if isinstance(route, Route)]
    served = {f"{method} {path}" for method, path, _ in api_routes(routes)}
    assert {name for name, _ in operations_of(document)} == served
    left_out = [route.path for route in routes if route.path not in {one.path for one in API_ROUTES}]  # type: ignore[attr-defined]
    assert left_out
    assert all(path == "/" or path.startswith(("/console", "/api/")) for path in left_out)


def test_operations_match_the_routes() -> None:
    assert OPERATIONS.keys() == {f"{method} {first_path}" for method, _, first_path in api_routes(API_ROUTES)}


def test_document_error_names_the_route_that_is_missing_from_the_table() -> None:
    with pytest.raises(LookupError, match="GET /v1/new is not in OPERATIONS"):
        gateway_document([*API_ROUTES, Route("/v1/new", lambda _: None)])


def test_document_error_names_the_mapped_parameter_that_has_no_shape() -> None:
    table = OPERATIONS[f"POST {CHAT}"].body
    assert isinstance(table, BodyTable)
    with pytest.raises(LookupError, match="parameter 'colour' has no shape; add it to ChatParameters"):
        Schemas().body(replace(table, rules={**table.rules, "colour": ParameterRule("mapped", "the colour")}))


def test_body_has_the_parameters_that_the_endpoint_accepts(document: dict[str, Any]) -> None:
    schema = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "max_completion_tokens", "service_tier", "cache_salt", "min_p", "regex"} <= schema[
        "properties"
    ].keys()
    assert not {"priority", "cache_scope", "audio", "echo"} & schema["properties"].keys()
    temperature = schema["properties"]["temperature"]["anyOf"]
    assert temperature == [{"type": "number", "minimum": 0, "maximum": limits.MAX_TEMPERATURE}, {"type": "null"}]


def test_examples_match_their_schemas(document: dict[str, Any]) -> None:
    problems = []
    for name, operation in operations_of(document):
        contents = {"request": operation.get("requestBody", {}).get("content", {})}
        contents |= {status: answer.get("content", {}) for status, answer in operation["responses"].items()}
        for part, content in contents.items():
            for media_type in content.values():
                schema = {**media_type.get("schema", {}), "components": document["components"]}
                for example in media_type.get("examples", {}).values():
                    found = Draft202012Validator(schema).iter_errors(example["value"])
                    problems += [f"{name} {part}: {error.message}" for error in found]
    assert problems == []


def test_every_operation_has_errors_examples_and_a_security_scheme(document: dict[str, Any]) -> None:
    schemes = document["components"]["securitySchemes"].keys()
    for name, operation in operations_of(document):
        for security in operation.get("security", document["security"]):
            assert security.keys() <= schemes, name
        if "application/json" in operation.get("requestBody", {}).get("content", {}):
            assert operation["requestBody"]["content"]["application/json"]["examples"], name
            assert {"400", "401", "403", "413", "415", "429", "500", "503"} <= operation["responses"].keys(), name


def raised_codes() -> Iterator[tuple[str, int, str]]:
    """Yield the file, the status and the code of each ApiError whose status and code are literals."""
    for file in HTTP.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "ApiError"
                and not {"console", "ollama"} & set(file.parts)
            ):
                codes = [one.value for one in node.keywords if one.arg == "code"]
                if (
                    node.args
                    and isinstance(node.args[0], ast.Constant)
                    and codes
                    and isinstance(codes[0], ast.Constant)
                ):
                    yield file.name, node.args[0].value, codes[0].value  # type: ignore[misc]


def test_code_table_contains_the_status_of_every_gateway_error() -> None:
    raised = list(raised_codes())
    assert ("models.py", 503, "not_ready") in raised
    wrong = []
    for file, status, code in raised:
        known = GATEWAY_CODES[code].http_status if code in GATEWAY_CODES else code in CODES and status_of_code(code)
        if known != status:
            wrong.append(f"{file}: {code} has status {status}, and the table has {known}")
    assert wrong == []


def test_null_is_accepted_only_for_optional_parameters() -> None:
    class OwnParameters(TypedDict, total=False):
        input: str
        encoding_format: str

    table = OPERATIONS["POST /v1/embeddings"].body
    assert isinstance(table, BodyTable)
    schema = Schemas().body(replace(table, own=OwnParameters))
    assert schema["properties"]["input"]["type"] == "string"
    assert schema["properties"]["encoding_format"]["anyOf"] == [{"type": "string"}, {"type": "null"}]

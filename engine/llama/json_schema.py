"""JSON Schema → GBNF, by llama-cpp-python's converter. What that would ignore is refused here, with its path."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from llama_cpp.llama_grammar import json_schema_to_gbnf

from ..errors import InvalidRequest

_ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
}
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_FORMATS = ("date", "date-time", "time", "uuid")

# The first of these keywords that a schema has decides what it is; with it go only those beside it.
_KINDS: tuple[tuple[str, frozenset[str]], ...] = (
    ("$ref", frozenset()),
    ("oneOf", frozenset()),
    ("anyOf", frozenset()),
    ("const", frozenset({"type"})),
    ("enum", frozenset({"type"})),
    ("properties", frozenset({"type", "required", "additionalProperties"})),
    ("additionalProperties", frozenset({"type"})),
    ("items", frozenset({"type", "minItems", "maxItems"})),
    ("prefixItems", frozenset({"type"})),
    ("pattern", frozenset({"type"})),
    ("format", frozenset({"type"})),
    ("minLength", frozenset({"type", "maxLength"})),
    ("maxLength", frozenset({"type"})),
    ("type", frozenset()),
)


@functools.lru_cache(maxsize=64)
def schema_to_gbnf(schema: str) -> str:
    """A grammar for the JSON that a schema (JSON text) describes.

    Raises InvalidRequest with the path of the first keyword that can't be turned into a grammar.
    """
    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise InvalidRequest(f"json_schema is no JSON: {error}") from None
    try:
        _check(parsed, "#")
        grammar = str(json_schema_to_gbnf(schema))
    except RecursionError:
        raise InvalidRequest("json_schema is nested too deeply; flatten it") from None
    except InvalidRequest:
        raise
    except Exception as error:  # the converter raises whatever it meets
        raise InvalidRequest(f"json_schema can't be turned into a grammar: {type(error).__name__}: {error}") from None
    return grammar.replace(r'[^"\\] |', r'[^"\\\x00-\x1F\x7F] |')  # JSON has no bare control characters in strings


def _check(schema: Any, path: str) -> None:
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"json_schema at {path} is {schema!r}; it must be a schema (an object)")
    for keyword in ("$defs", "definitions"):
        _check_named(schema.get(keyword, {}), f"{path}/{keyword}")
    keywords = [keyword for keyword in schema if keyword not in _ANNOTATIONS]
    kind = next(((name, beside) for name, beside in _KINDS if name in keywords), None)
    if kind is None and not keywords:
        raise InvalidRequest(f"json_schema at {path} allows anything; give it a type")
    for keyword in keywords:
        if kind is None or (keyword != kind[0] and keyword not in kind[1]):
            beside = f" beside {kind[0]!r}" if kind else ""
            raise InvalidRequest(
                f"json_schema at {path}/{keyword}: {keyword!r} can't be turned into a grammar{beside}; leave it out"
            )
    assert kind is not None
    _check_kind(kind[0], schema, path)


def _check_kind(kind: str, schema: Mapping[str, Any], path: str) -> None:
    value, here = schema[kind], f"{path}/{kind}"
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        _check_one_of(name, _TYPES, f"{path}/type")
    if kind == "$ref":
        if not str(value).startswith("#/"):
            raise InvalidRequest(f"json_schema at {here} is {value!r}; only references within it (#/…) are followed")
    elif kind in ("oneOf", "anyOf", "prefixItems"):
        for index, inner in enumerate(_must_be(list, value, here)):
            _check(inner, f"{here}/{index}")
    elif kind == "enum":
        _must_be(list, value, here)
    elif kind == "properties":
        _check_object(schema, path)
    elif kind in ("items", "additionalProperties"):
        _check_inner(value, here)
    elif kind == "pattern" and not (str(value).startswith("^") and str(value).endswith("$")):
        raise InvalidRequest(f"json_schema at {here} is {value!r}; a pattern must begin with ^ and end with $")
    elif kind == "format":
        _check_one_of(value, _FORMATS, here)


def _check_object(schema: Mapping[str, Any], path: str) -> None:
    _check_named(schema["properties"], f"{path}/properties")
    for name in _must_be(list, schema.get("required", []), f"{path}/required"):
        if name not in schema["properties"]:
            raise InvalidRequest(f"json_schema at {path}/required names {name!r}, which is not among the properties")
    if "additionalProperties" in schema:
        _check_inner(schema["additionalProperties"], f"{path}/additionalProperties")


def _check_named(schemas: Any, path: str) -> None:
    for name, inner in _must_be(Mapping, schemas, path).items():
        _check(inner, f"{path}/{name}")


def _check_inner(schema: Any, path: str) -> None:
    if not (isinstance(schema, bool) and path.endswith("/additionalProperties")):
        _check(schema, path)


def _check_one_of(value: Any, known: tuple[str, ...], path: str) -> None:
    if value not in known:
        raise InvalidRequest(f"json_schema at {path} is {value!r}; known: {', '.join(known)}")


def _must_be(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise InvalidRequest(f"json_schema at {path} is {value!r}; it must be {wanted}")
    return value

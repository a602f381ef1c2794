"""Which keywords of JSON Schema a grammar can keep, with which values, and which schemas exclude each other. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from cellama.config import limits
from cellama.engine.errors import InvalidRequest

from .json_values import type_of

ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
        *("$schema", "$id", "$comment", "$defs", "definitions"),
    }
)
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
# The first of these that a schema has decides what it is; with it go only those beside it.
KINDS: dict[str | None, frozenset[str]] = {
    "$ref": frozenset(),
    "oneOf": frozenset(),
    "anyOf": frozenset(),
    "allOf": frozenset(),
    "const": frozenset({"type"}),
    "enum": frozenset({"type"}),
}
# All others say something of one type, and nothing of the others.
OF_TYPE = {
    **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("pattern", "format", "minLength", "maxLength"), "string"),
}

Target = Callable[[str], Any]
_SHOWN_CHARS = 200  # of a path
_MAX_STEPS = 8  # into properties and references


def exclude_each_other(schemas: list[Any], target: Target) -> bool:
    """True if it is certain that no value fits two of these schemas. `target` gives what a reference names."""
    return all(_exclude(one, other, target, _MAX_STEPS) for one, other in itertools.combinations(schemas, 2))


def _exclude(one: Any, other: Any, target: Target, steps: int) -> bool:
    if steps == 0:
        return False
    if "$ref" in one:
        return _exclude(target(one["$ref"]), other, target, steps - 1)
    if "$ref" in other:
        return _exclude(one, target(other["$ref"]), target, steps - 1)
    if not _types(one) & _types(other):
        return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not any(isinstance(a, bool) == isinstance(b, bool) and a == b for a in values for b in others)
    return _types(one) == _types(other) == {"object"} and _differ(one, other, target, steps)


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], target: Target, steps: int) -> bool:
    """True if a property that one of two objects must have tells them apart."""
    for must, may in ((one, other), (other, one)):
        for name in must.get("required", ()):
            if name not in may.get("properties", {}):
                if may.get("additionalProperties") is False:
                    return True
            elif _exclude(must["properties"][name], may["properties"][name], target, steps - 1):
                return True
    return False


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a value of the schema may have."""
    values = _values(schema)
    if values is not None:
        return set().union(*map(type_of, values))
    given = schema.get("type", TYPES)
    types = {given} if isinstance(given, str) else set(given)
    return types | {"integer"} if "number" in types else types


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def refused(path: str, reason: str) -> InvalidRequest:
    shown = path if len(path) <= _SHOWN_CHARS else f"{path[:_SHOWN_CHARS]}…"
    return InvalidRequest(f"json_schema at {shown}{reason}")


def bounds(schema: Mapping[str, Any], path: str, low: str, high: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for keyword, value in ((low, least), (high, 0 if most is None else most)):
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value) and value >= 0
        if not whole or value > limits.MAX_GRAMMAR_REPEATS:
            raise refused(
                path, f"/{keyword} is {show(value)}; it must be a whole number from 0 to {limits.MAX_GRAMMAR_REPEATS}"
            )
    if most is not None and least > most:
        raise refused(path, f": {low} is {least} and {high} is {most}; nothing can be both")
    return int(least), None if most is None else int(most)


def types_of(schema: Mapping[str, Any], path: str) -> set[str]:
    given = schema.get("type", [])
    names = given if isinstance(given, list) else [given]
    for name in names:
        check_one_of(name, sorted(TYPES), f"{path}/type")
    if given == [] and "type" in schema:
        raise refused(path, "/type is empty; name at least one")
    return set(names)


def check_one_of(value: Any, known: list[str], path: str) -> None:
    if not isinstance(value, str) or value not in known:
        raise refused(path, f" is {show(value)}; known: {', '.join(known)}")


def must_be(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "text" if kind is str else "an object"
        raise refused(path, f" is {show(value)}; it must be {wanted}")
    return value


def show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

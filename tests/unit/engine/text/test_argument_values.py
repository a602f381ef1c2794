"""Arguments that a model wrote as bare text have the types of their schema, whatever schema the caller sends."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.engine.text.formats.argument_values import ArgumentValues


def read(schema: Any, text: str, **more: Any) -> Any:
    return ArgumentValues({"type": "object", "properties": {"x": schema}, **more}).read("x", text)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": "integer"}, "7", 7),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "7", 7),
        ({"enum": ["7"]}, "7", "7"),
        ({"$ref": "#/$defs/name"}, "7", "7"),
        ({}, "[1]", [1]),
        (True, "[1]", [1]),
        ({"type": 5}, "7", 7),
        ({"type": ["string", 5]}, "7", "7"),
        ({"anyOf": 5}, "7", 7),
        ({"anyOf": [5, {"type": "string"}]}, "7", 7),
        ({"$ref": "#/$defs/missing"}, "a", "a"),
    ],
)
def test_argument_is_converted_to_the_types_of_its_schema(schema: Any, text: str, value: Any) -> None:
    found = read(schema, text, **{"$defs": {"name": {"type": "string"}}})
    assert (type(found), found) == (type(value), value)


def test_schema_with_many_self_references_has_no_types() -> None:
    many = {"anyOf": [{"$ref": "#/$defs/many"}] * 5000}
    assert read({"$ref": "#/$defs/many"}, "7", **{"$defs": {"many": many}}) == 7

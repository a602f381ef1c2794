"""Bare values of arguments are read by what their schema says, whatever schema somebody sends."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.engine.text.formats.argument_values import Values


def read(schema: Any, text: str, **more: Any) -> Any:
    return Values({"type": "object", "properties": {"x": schema}, **more}).read("x", text)


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
def test_value_is_read_by_the_types_of_its_schema(schema: Any, text: str, value: Any) -> None:
    found = read(schema, text, **{"$defs": {"name": {"type": "string"}}})
    assert (type(found), found) == (type(value), value)


def test_schema_that_names_itself_very_often_says_nothing_and_takes_no_time() -> None:
    many = {"anyOf": [{"$ref": "#/$defs/many"}] * 5000}
    assert read({"$ref": "#/$defs/many"}, "7", **{"$defs": {"many": many}}) == 7

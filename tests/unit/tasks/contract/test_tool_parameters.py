"""The parameters of a tool: a JSON Schema of an object, or a reference to one."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.tasks.contract.payloads import check_schema

TREE: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Tree"}}, "required": ["next"]}


def test_tool_parameters_can_be_a_reference_to_an_object() -> None:
    schema = {"$defs": {"Tree": TREE}, "$ref": "#/$defs/Tree"}
    assert check_schema(schema) == schema


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "array"}, "the schema has type 'array'"),
        ({"$ref": "#/$defs/Tree"}, "the schema has type None"),
        ({"$defs": {"Tree": {"type": "string"}}, "$ref": "#/$defs/Tree"}, "the schema has type 'string'"),
        ({"$defs": {"Tree": {**TREE, "required": ["other"]}}, "$ref": "#/$defs/Tree"}, "`required` is not valid"),
        ({"$defs": {"Tree": {**TREE, "properties": []}}, "$ref": "#/$defs/Tree"}, "properties are not valid"),
        ({"$defs": [], "$ref": ["#"]}, "the schema has type None"),
    ],
)
def test_invalid_tool_parameters_are_rejected(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_schema(schema)

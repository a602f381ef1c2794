"""A rewritten schema accepts the same values as the original, according to jsonschema, or fewer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from .samples import accepts, check_samples, compiled

SCALARS: list[Any] = [None, False, True, 0, 1, 2, 3, -1, 1.5, "", "a", "b", "ab", "abc"]
FEW: list[Any] = [None, True, 1, 2, "a", "b"]
ARRAYS: list[Any] = [list(each) for size in range(4) for each in itertools.product(FEW[1:], repeat=size)]
OBJECTS: list[Any] = [
    dict(zip(names, values, strict=True))
    for size in range(4)
    for names in itertools.combinations(("a", "b", "c", "x1"), size)
    for values in itertools.product([1, 2, "a"], repeat=size)
]
INSTANCES = [*SCALARS, *ARRAYS, *OBJECTS]
ABC = {"a": {"type": "integer"}, "b": {}, "c": {}}
KIND = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "integer"}}, "required": ["a"]}

# The rewritten schema accepts exactly the same values.
EQUIVALENT: dict[str, Any] = {
    "uniqueItems of an enum": {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
    "uniqueItems of booleans": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
    "uniqueItems of few integers": {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "exclusiveMaximum": 3},
        "uniqueItems": True,
    },
    "uniqueItems with bounds": {
        "type": "array",
        "items": {"enum": ["a", "b", 1, 2]},
        "uniqueItems": True,
        "minItems": 1,
        "maxItems": 2,
    },
    "uniqueItems of one item": {"type": "array", "items": {"enum": FEW}, "uniqueItems": True, "maxItems": 1},
    "minProperties": {"type": "object", "properties": ABC, "additionalProperties": False, "minProperties": 2},
    "maxProperties": {"type": "object", "properties": ABC, "additionalProperties": False, "maxProperties": 1},
    "exactly two properties": {
        "type": "object",
        "properties": ABC,
        "additionalProperties": False,
        "minProperties": 2,
        "maxProperties": 2,
        "required": ["b"],
    },
    "minProperties of a map": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    "maxProperties of a map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "patternProperties alone": {
        "type": "object",
        "patternProperties": {"^x": {"type": "integer"}},
        "additionalProperties": False,
    },
    "patternProperties and properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "patternProperties": {"^x": {"type": "string"}},
        "additionalProperties": False,
    },
    "patternProperties that a property has": {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "patternProperties": {"a": {"type": "integer"}},
        "additionalProperties": False,
    },
    "if then else by a property": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {}},
        "required": ["a"],
        "additionalProperties": False,
        "if": {"properties": {"a": {"const": 1}}},
        "then": {"required": ["b"]},
        "else": {"properties": {"b": False}},
    },
    "if then by type": {"type": ["integer", "string"], "if": {"type": "integer"}, "then": {"minimum": 2}},
    "if else by a bound": {"type": "integer", "if": {"minimum": 2}, "else": {"const": 0}},
    "not of a type": {"not": {"type": ["object", "array", "number", "null"]}},
    "not of values": {"type": ["string", "integer"], "not": {"enum": ["a", "ab", 1]}},
    "not of a constant": {"type": "string", "not": {"const": "a"}},
    "not of bounds": {"type": "integer", "not": {"minimum": 2}},
    "not of a length": {"type": "string", "not": {"minLength": 2}},
    "not of required": {
        "type": "object",
        "properties": ABC,
        "additionalProperties": False,
        "not": {"required": ["a", "b"]},
    },
    "not of properties": {
        "type": "object",
        "properties": ABC,
        "additionalProperties": False,
        "not": {"properties": {"a": {"const": 1}}},
    },
    "not of anyOf": {
        "type": ["integer", "string"],
        "not": {"anyOf": [{"type": "integer", "minimum": 2}, {"type": "string", "maxLength": 1}]},
    },
    "not of not": {"not": {"not": {"type": "integer", "minimum": 2}}},
    "not of array sizes": {
        "type": "array",
        "items": {"enum": FEW},
        "not": {"minItems": 2},
    },
    "dependentRequired": {
        "type": "object",
        "properties": ABC,
        "additionalProperties": False,
        "dependentRequired": {"a": ["b"], "c": ["a"]},
    },
    "dependentSchemas": {
        "type": "object",
        "properties": ABC,
        "additionalProperties": False,
        "dependentSchemas": {"b": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
    },
    "propertyNames by enum": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "integer"},
    },
    "propertyNames by pattern": {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {}},
    "propertyNames by length": {"type": "object", "propertyNames": {"maxLength": 1}, "additionalProperties": True},
    "propertyNames of Zod": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "integer"},
    },
    "oneOf by types": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "oneOf by a constant": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"a": {"const": value}, "b": {"type": kind}},
                "required": ["a"],
                "additionalProperties": False,
            }
            for value, kind in ((1, "integer"), (2, "string"))
        ]
    },
    "oneOf of overlapping values": {"oneOf": [{"enum": ["a", "b", 1]}, {"enum": ["b", 2]}]},
    "oneOf of overlapping ranges": {"oneOf": [{"type": "integer", "maximum": 2}, {"type": "integer", "minimum": 1}]},
    "oneOf of required": {
        "type": "object",
        "properties": ABC,
        "additionalProperties": False,
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "additionalProperties": False},
            {"required": ["a"]},
            {"properties": {"a": {"maximum": 1}}},
        ]
    },
    "allOf of unions": {"allOf": [{"type": ["string", "integer", "null"]}, {"type": ["integer", "null", "boolean"]}]},
    "unevaluatedProperties": {
        "allOf": [{"type": "object", "properties": {"a": {}}}, {"properties": {"b": {}}}],
        "unevaluatedProperties": False,
    },
    "unevaluatedProperties of constants": {
        "anyOf": [{"const": {"a": 1}}, {"const": {"b": "a"}}, {"const": {}}],
        "unevaluatedProperties": {"type": "string"},
    },
    "unevaluatedItems": {
        "type": "array",
        "allOf": [{"prefixItems": [{"const": 1}], "minItems": 1}],
        "unevaluatedItems": {"enum": ["a"]},
    },
    "contains of short arrays": {"type": "array", "items": {"enum": FEW}, "contains": {"const": 1}, "maxItems": 3},
    "contains twice": {
        "type": "array",
        "items": {"enum": FEW},
        "contains": {"const": 1},
        "minContains": 2,
        "maxItems": 3,
    },
    "exclusive bounds of draft 4": {
        "type": "integer",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 2,
        "exclusiveMaximum": True,
    },
    "items as a list": {"type": "array", "items": [{"const": 1}], "additionalItems": {"const": "a"}, "minItems": 0},
    "dependencies of draft 7": {
        "type": "object",
        "properties": ABC,
        "additionalProperties": False,
        "dependencies": {"a": ["b"], "c": {"required": ["a"]}},
    },
}
OLD_SPELLINGS = {
    "exclusive bounds of draft 4": jsonschema.Draft4Validator,
    "items as a list": jsonschema.Draft7Validator,
    "dependencies of draft 7": jsonschema.Draft7Validator,
}

# The rewritten schema accepts fewer values, though not always fewer of these instances.
NARROWER: dict[str, Any] = {
    "uniqueItems in order": {"type": "array", "items": {"enum": FEW}, "uniqueItems": True, "maxItems": 3},
    "contains among the first": {"type": "array", "items": {"enum": FEW}, "contains": {"const": 1}},
    "objects that don't mention other properties": {"type": "object", "properties": ABC},
    "schemas without a type": {"required": ["a"]},
    "tuples": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    "overlapping patterns": {
        "type": "object",
        "patternProperties": {"^x": {"type": "integer"}, "1$": {"enum": [1, "a"]}},
        "additionalProperties": False,
    },
    "oneOf of objects that may have more": {
        "oneOf": [
            {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {}}, "required": ["b"]},
        ]
    },
    "if whose opposite is unknown": {
        "type": "string",
        "if": {"pattern": "^a"},
        "then": {"minLength": 2},
        "else": {"maxLength": 2},
    },
    "minProperties of an open object": {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "additionalProperties": {"type": "integer"},
        "minProperties": 2,
    },
    "maxProperties of an open object": {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "additionalProperties": {"type": "integer"},
        "maxProperties": 1,
    },
    "not of items": {"type": "array", "items": {"enum": FEW}, "not": {"items": {"type": "integer"}}},
}


def accepted(schema: Any) -> list[Any]:
    grammar = compiled(schema)
    return [each for each in INSTANCES if accepts(grammar, json.dumps(each, ensure_ascii=False))]


def valid(schema: Any, kind: Any = jsonschema.Draft202012Validator) -> list[Any]:
    validator = kind(schema)
    return [each for each in INSTANCES if validator.is_valid(each)]


@pytest.mark.parametrize("name", EQUIVALENT)
def test_rewritten_schema_accepts_the_same_values(name: str) -> None:
    schema = EQUIVALENT[name]
    found = accepted(schema)
    assert [json.dumps(each) for each in found] == [
        json.dumps(each) for each in valid(schema, OLD_SPELLINGS.get(name, jsonschema.Draft202012Validator))
    ]
    assert found
    assert len(found) < len(INSTANCES)
    if name not in OLD_SPELLINGS:
        assert check_samples(schema)


@pytest.mark.parametrize("name", NARROWER)
def test_narrower_schema_accepts_only_conforming_values(name: str) -> None:
    schema = NARROWER[name]
    found, expected = ({json.dumps(each) for each in values} for values in (accepted(schema), valid(schema)))
    assert found
    assert found <= expected
    assert check_samples(schema)


def test_openapi_nullable_allows_null() -> None:
    assert accepted({"type": "string", "nullable": True, "maxLength": 1}) == [None, "", "a", "b"]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, ["0", "-9007199254740991"], ["9007199254740992", "01", "1.0", "1e3"]),
        ({"type": "number"}, ["0.5", "-999999999999999.25", "12"], ["1e999", "0.12345678901", "1" * 17]),
        ({"type": "number", "exclusiveMaximum": 0}, ["-0.5"], ["-0", "0", "-0.0"]),
        ({"type": "number", "multipleOf": 0.25}, ["0.75", "-2"], ["0.3", "0.750"]),
        ({"type": "integer", "minimum": 10**17}, [str(10**17)], ["5", "9" * 25]),
        ({"const": 1.5}, ["1.5"], ["1.50", "15e-1"]),
        ({"type": "number", "minimum": 0.30000000000000004}, ["0.3000000001", "1"], ["0.3", "0.2999999999"]),
        ({"enum": [3, 1e20, 0.1]}, ["3", "0.1"], ["1e20", "100000000000000000000"]),
        ({"type": "string"}, ['"é\\n"', '"\U0001f600"'], ['"\\u00e9"', '"\\ud83d"', '"\n"', '"\\/"']),
        ({"enum": ["a\tb", "\u0001"]}, ['"a\\tb"'], ['"\\u0001"', '"a\tb"']),
        ({"type": "array", "items": {"type": "null"}}, ["[]", "[null, null]"], ["[null,null]", "[ null]"]),
        ({}, ['{"a": [1.5, {"b": null}]}', "true", "[" * 16 + "]" * 16], ['{"a":1}', "1e5", "[" * 20 + "]" * 20]),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            ['{"a": 1, "b": "x", "b": "y"}', '{"b": "x"}', '{"a": 1}'],
            ['{"a": 1, "a": "x"}', '{"a": "x"}', '{"\\u0061": "x"}', '{"b": "x", "a": 1}'],
        ),
    ],
)
def test_each_value_has_one_layout_and_one_spelling(schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = compiled(schema)
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"pattern": "^[[a]&&b]$"}, ['"[&&b]"', '"a&&b]"'], ['"a"', '"b"']),  # ECMA-262: a class of [ and a, then text
        ({"enum": ["ab", "cb", "b"], "pattern": "^.b", "minLength": 2}, ['"ab"', '"cb"'], ['"b"']),
        ({"format": "date", "pattern": "^20"}, ['"2026-01-31"'], ['"1999-01-31"', '"2026-02-30"']),
        ({"format": "time", "pattern": "^[0-9:]{5}$"}, ['"12:30"'], ['"12:30:00Z"']),  # no time has both
        ({"format": "email", "maxLength": 9}, ['"a@b.com"'], ['"abcd@b.com"', '"a@b"']),
        ({"format": "duration"}, ['"P1DT2H"', '"P3W"'], ['"P"', '"PT"', '"1D"']),
        ({"format": "int64"}, ['"anything"'], ["1"]),
        ({"pattern": "^a{2,3}$"}, ['"aa"', '"aaa"'], ['"a"', '"aaaa"']),
        ({"pattern": "b"}, ['"abc"', '"b"'], ['"ac"', '"é"']),
    ],
)
def test_patterns_and_formats_of_strings_are_enforced_together(schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = compiled({"type": "string", **schema})
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


def test_repeated_keys_are_allowed_only_with_conforming_values() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2}
    grammar = compiled(schema)
    assert accepts(grammar, '{"a": 1, "a": 2}')  # the last one counts, and conforms
    assert not accepts(grammar, '{"a": 1, "a": "x"}')

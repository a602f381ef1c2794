"""Keywords are enforced, rejected or ignored as documented, and hostile schemas are rejected early."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from cellama.config import limits
from cellama.engine.errors import InvalidRequest
from cellama.engine.grammar.schema import prepare_schema
from cellama.engine.grammar.schema.keywords import DROPPED, ENFORCED, IGNORED, KEYWORDS, REFUSED, REWRITTEN
from cellama.engine.grammar.schema.patterns import LAYOUT

from .samples import accepts, compiled


def prepared(schema: Any, *, strict: bool = True) -> Any:
    return prepare_schema(json.dumps(schema), strict=strict)


def in_property(schema: Any) -> Any:
    return {"type": "object", "properties": {"n": schema}, "required": ["n"]}


# Schemas with a keyword that can't be enforced, the keyword, and the reason.
UNENFORCEABLE: list[tuple[Any, str, str]] = [
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems", "few possible values"),
    (
        {"type": "array", "items": {"enum": list(range(12))}, "uniqueItems": True},
        "uniqueItems",
        "too many alternatives",
    ),
    ({"type": "array", "contains": {"const": 1}, "maxContains": 2}, "maxContains", "the other items"),
    ({"type": "array", "minItems": 10**9}, "minItems", "at most 1000 items"),
    ({"type": "string", "pattern": "(?=a)"}, "pattern", "look-around"),
    ({"type": "string", "pattern": "(?=a)", "format": "email"}, "pattern", "look-around"),
    ({"type": "string", "pattern": "("}, "pattern", "unclosed group"),
    ({"type": "string", "not": {"pattern": "a"}}, "not", "'pattern' can't be negated"),
    ({"type": "number", "not": {"multipleOf": 3}}, "not", "'multipleOf' can't be negated"),
    ({"type": "number", "multipleOf": 1e-300}, "multipleOf", "too many digits"),
    ({"type": "number", "minimum": 10**300}, "minimum", "beyond ±10^18"),
    ({"type": "object", "patternProperties": {"(?!a)": {}}}, "patternProperties", "look-around"),
    (
        {"type": "object", "additionalProperties": {}, "minProperties": 2},
        "minProperties",
        "only one additional property",
    ),
    (
        {"type": "object", "additionalProperties": {}, "propertyNames": {"pattern": "^a", "maxLength": 3}},
        "propertyNames",
        "only one of enum, pattern, format and length",
    ),
    (
        {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
        "oneOf",
        "several of its schemas",
    ),
    (
        {"if": {"pattern": "a"}, "then": {"type": "string"}, "else": {"type": "null"}},
        "if",
        "'pattern' can't be negated",
    ),
]


@pytest.mark.parametrize(("schema", "keyword", "reason"), UNENFORCEABLE)
def test_unenforceable_keyword_is_rejected_if_strict(schema: Any, keyword: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"at #/properties/n/{keyword}: '{keyword}' can't be enforced: ") as caught:
        prepared(in_property(schema))
    assert reason in str(caught.value)


@pytest.mark.parametrize(("schema", "keyword", "reason"), UNENFORCEABLE)
def test_unenforceable_keyword_is_a_warning_if_not_strict(schema: Any, keyword: str, reason: str) -> None:
    found = prepared(in_property(schema), strict=False)
    assert found.warnings == (f"json_schema at #/properties/n: '{keyword}' is not enforced",)
    assert compiled(found.schema, strict=False)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "at #/type is 'objekt'; it must be one or more of array, boolean"),
        ({"type": []}, r"at #/type is \[\]; it must be one or more"),
        ({"minimum": "3"}, "at #/minimum is '3'; it must be a number"),
        (
            {"properties": {"a": {"minLength": -1}}},
            "at #/properties/a/minLength is -1; it must be a whole number of at least 0",
        ),
        ({"maxItems": 1.5}, "at #/maxItems is 1.5; it must be a whole number of at least 0"),
        ({"multipleOf": 0}, "at #/multipleOf is 0; it must be a number above 0"),
        ({"enum": []}, r"at #/enum is \[\]; it must be a list of at least one value"),
        ({"required": "a"}, "at #/required is 'a'; it must be a list of strings"),
        ({"properties": []}, r"at #/properties is \[\]; it must be an object"),
        ({"properties": {"a": 5}}, "at #/properties is {'a': 5}; it has 5 at 'a', which must be a schema"),
        ({"anyOf": []}, r"at #/anyOf is \[\]; it must be a list of at least one schema"),
        ({"pattern": 3}, "at #/pattern is 3; it must be a string"),
        ({"$defs": {"unused": {"pattern": 3}}}, "at #/\\$defs/unused/pattern is 3; it must be a string"),
        ({"properties": {"a/b": {"items": 1}}}, "at #/properties/a~1b/items is 1; it must be a schema"),
        ({"$ref": "https://example.org/x.json"}, r"at #/\$ref is 'https://example.org/x.json'; only references within"),
        ({"$ref": "#/$defs/missing"}, r"at #/\$ref is '#/\$defs/missing', which the schema does not contain"),
        ({"$ref": "#missing"}, r"at #/\$ref is '#missing', which the schema does not contain"),
        ({"$ref": "#"}, "at # refers to itself directly"),
        ({"allOf": [{"$ref": "#"}, {"minLength": 1}]}, "refers to itself directly"),
        ({"type": "number", "minimum": 3, "maximum": 2}, "at #: no value conforms to this schema"),
        (in_property({"type": "null", "enum": ["a"]}), "at #/properties/n: no value conforms to this schema"),
        (in_property({"allOf": [{"type": "string"}, {"type": "number"}]}), "at #/properties/n: no value conforms"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no value conforms to this schema"),
        (
            in_property({"format": "date", "allOf": [{"type": "string", "pattern": "^x"}]}),
            "at #/properties/n: no value",
        ),
        (False, "no value conforms to this schema"),
        ({"not": {}}, "no value conforms to this schema"),
        ({"type": "string", "pattern": "^a", "const": "b"}, "no value conforms to this schema"),
        ({"const": "\ud800"}, r"is not valid JSON: '\\ud800' contains an unpaired surrogate"),
        ({"const": float("inf")}, "is not valid JSON: Infinity is too large or is not a number"),
        (3, "at # is 3; it must be a schema"),
        (
            in_property({"const": "\u0001"}),
            r"at #/properties/n/const is '\\x01', which can't be generated; avoid control",
        ),
        (in_property({"enum": [1e30, 0.30000000000000004]}), r"at #/properties/n/enum is .*, which can't be generated"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_invalid_schema_is_rejected_with_its_path(schema: Any, message: str, strict: bool) -> None:
    with pytest.raises(InvalidRequest, match=f"^json_schema[ :].*{message}"):
        prepared(schema, strict=strict)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"type": "null", "type": "string"}', "the key 'type' occurs twice"),
        ('{"minimum": 1e999}', "1e999 is too large"),
        ('{"items":' * 10_000, "is nested too deeply; flatten it"),
        ('"' + "x" * limits.MAX_SCHEMA_CHARS + '"', "characters; shorten it to 100000 or fewer"),
    ],
)
def test_string_is_rejected_when_it_is_not_a_schema(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^tools.0.parameters .*{message}"):
        prepare_schema(text, strict=False, where="tools.0.parameters")


def test_annotations_and_unknown_keywords_are_ignored_silently() -> None:
    annotations = {
        name: "#x" if name == "$recursiveAnchor" else {"any": "thing"}
        for name, each in KEYWORDS.items()
        if each.group == "annotations"
    }
    schema = {"type": "integer", **annotations, "x-order": 1, "unheardOf": [1], "format": "int64", "$schema": 3}
    assert prepared(schema) == prepared({"type": "integer"})


@pytest.mark.parametrize(
    "schema", [{"type": "integer"}, {}, True, {"x-guidance": {"whitespace_flexible": True, "lenient": True}}]
)
def test_layout_is_fixed_even_when_the_schema_requests_a_different_layout(schema: Any) -> None:
    assert prepared(schema).schema["x-guidance"] == LAYOUT


def test_every_keyword_in_the_table_is_handled_in_a_known_way() -> None:
    for name, keyword in KEYWORDS.items():
        assert {keyword.strict, keyword.lenient} <= {ENFORCED, REWRITTEN, IGNORED, REFUSED, DROPPED}, name


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}}, "null", "1"),
        ({"$ref": "#here", "definitions": {"x": {"$anchor": "here", "type": "null"}}}, "null", "1"),
        ({"$ref": "x.json", "$defs": {"x": {"$id": "x.json", "type": "null"}}}, "null", "1"),
        ({"$id": "https://example.org/a/", "$ref": "/b", "$defs": {"x": {"$id": "/b", "type": "null"}}}, "null", "1"),
        ({"$ref": "#/unknown/0", "unknown": [{"type": "null"}]}, "null", "1"),
        ({"$dynamicRef": "#n", "$defs": {"x": {"$dynamicAnchor": "n", "type": "null"}}}, "null", "1"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, '{"a": {"a": {}}}', '{"a": 1}'),
        ({"type": "array", "prefixItems": [{"$ref": "#"}, {"type": "null"}]}, "[[[], null], null]", "[null, null]"),
        ({"$ref": "#/$defs/x", "minimum": 2, "$defs": {"x": {"type": "integer"}}}, "2", "1"),
        (
            {
                "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                "$defs": {
                    "a": {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}, "x": {"type": "null"}}},
                    "b": {"type": "object", "properties": {"n": {"$ref": "#/$defs/b"}, "y": {"type": "null"}}},
                },
            },
            '{"n": {"n": {}, "y": null}, "x": null}',
            '{"n": {"n": {"y": 1}}}',
        ),
    ],
)
def test_references_within_the_schema_are_followed(schema: Any, right: str, wrong: str) -> None:
    grammar = compiled(schema)
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


def nested(make: Callable[[Any], Any], depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = make(schema)
    return schema


@pytest.mark.parametrize(
    "make",
    [
        lambda inner: {"items": inner},
        lambda inner: {"anyOf": [inner, {"type": "null"}]},
        lambda inner: {"allOf": [inner, {"minLength": 1}]},
        lambda inner: {"not": inner},
    ],
)
def test_nested_schema_is_accepted_up_to_the_limit(make: Callable[[Any], Any]) -> None:
    prepared(nested(make, limits.MAX_SCHEMA_DEPTH - 2))
    with pytest.raises(InvalidRequest, match=r"nested more than 64 schemas deep; flatten it|nested too deeply"):
        prepared(nested(make, limits.MAX_SCHEMA_DEPTH + 1))


def chain(make: Callable[[str], Any], size: int) -> Any:
    links = {f"d{at}": make(f"#/$defs/d{at + 1}") for at in range(size)}
    return {"$defs": {**links, f"d{size}": {"type": "null"}}, "$ref": "#/$defs/d0"}


TOO_MUCH: dict[str, Any] = {
    "alternatives": {
        "allOf": [{"anyOf": [{"required": [f"a{at}"]}, {"required": [f"b{at}"]}]} for at in range(30)],
    },
    "tests": {
        "allOf": [{"if": {"properties": {f"k{at}": {"const": 1}}}, "then": {"required": ["r"]}} for at in range(30)]
    },
    "oneOf": {
        "oneOf": [{"type": "object", "properties": {"k": {"const": at}}, "required": ["k"]} for at in range(500)]
    },
    "values": {"const": {f"k{at}": [at] * 3 for at in range(3000)}},
    "patterns": {
        "type": "object",
        "properties": {f"a{at}": {} for at in range(100)},
        "patternProperties": {f"a.*{at}": {} for at in range(100)},
    },
    "references": chain(lambda to: {"properties": {"x": {"$ref": to}}}, 1500),
    "references in place": chain(lambda to: {"allOf": [{"$ref": to}, {"title": "x", "minLength": 1}]}, 1000),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", TOO_MUCH)
def test_hostile_schema_is_rejected(name: str, strict: bool) -> None:
    with pytest.raises(InvalidRequest, match=r"too many|schemas that refer to each other|reached through too many"):
        prepared(TOO_MUCH[name], strict=strict)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value {at}" for at in range(5000)]},
        {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(1500)}},
        chain(lambda to: {"type": "array", "prefixItems": [{"$ref": to}, {"$ref": to}]}, 30),
        chain(lambda to: {"allOf": [{"$ref": to}, {"$ref": to}]}, 20),
        {"type": "array", "maxItems": 10**9, "items": {"type": "array", "maxItems": 10**9}},
        {
            "type": "object",
            "properties": {
                f"p{at}": {"type": "array", "items": {"type": "string"}, "maxItems": 999} for at in range(20)
            },
        },
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "pattern": "(a|b)*a(a|b){25}", "maxLength": 1000},
        {"anyOf": [{"type": "object", "properties": {"k": {"const": at}}, "required": ["k"]} for at in range(300)]},
    ],
)
def test_large_schema_is_accepted(schema: Any) -> None:
    assert compiled(schema).start()

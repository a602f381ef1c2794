"""Outputs of generated schemas conform to them, or the schemas are rejected with a path."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings, strategies as st

from cellama.engine.errors import InvalidRequest

from .....conftest import EXAMPLES
from .samples import check_samples

NAMES = st.sampled_from(["a", "b", "ab", "root", 'q"', "back\\slash", "", "é", "new\nline", "s0", "any"])
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([1.0, 0.5, -1e20, 1e-7]) | NAMES
PATTERNS = st.sampled_from(
    [
        *("^a|b$", "^.$", "a", "^[^a-c\\d]{2,3}$", "^(ab|\\d+)*$", '^"\\\\$', "^\\w+@\\w+\\.[a-z]{2}$", "b{2}|^$"),
        *("^[\\]\\-\\\\]$", "^(?:x|(y)?)z$", "^\\u00e9\\x41\\n\\t$", "^[a-]$", "\\/", "^s"),
    ]
)
FORMATS = st.sampled_from(["date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "uri", "duration"])
TYPES = ["array", "boolean", "integer", "null", "number", "object", "string"]


def optional(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


SIZES = st.integers(0, 3)
SIMPLE = (
    st.sampled_from(TYPES).map(lambda name: {"type": name})
    | st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True).map(lambda names: {"type": names})
    | st.lists(SCALARS | st.lists(SCALARS, max_size=2), min_size=1, max_size=4).map(lambda values: {"enum": values})
    | SCALARS.map(lambda value: {"const": value})
    | optional(minLength=SIZES, maxLength=SIZES, pattern=PATTERNS).map(lambda more: {"type": "string", **more})
    | FORMATS.map(lambda name: {"type": "string", "format": name})
    | optional(
        minimum=st.integers(-9, 9), exclusiveMaximum=st.integers(-9, 99) | st.just(2.5), multipleOf=st.just(0.5)
    ).map(lambda more: {"type": "number", **more})
    | st.sampled_from(["#/$defs/string", "#/$defs/a~1b", "#/$defs/node", "#"]).map(lambda name: {"$ref": name})
)


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    arrays = optional(
        items=inner | st.booleans(),
        prefixItems=several,
        minItems=SIZES,
        maxItems=SIZES,
        contains=inner,
        uniqueItems=st.booleans(),
    ).map(lambda more: {"type": "array", **more})
    objects = optional(
        properties=st.dictionaries(NAMES, inner, max_size=3),
        required=st.lists(NAMES, max_size=2, unique=True),
        additionalProperties=inner | st.booleans(),
        patternProperties=st.dictionaries(PATTERNS, inner, max_size=2),
        minProperties=st.integers(0, 2),
        maxProperties=SIZES,
        propertyNames=PATTERNS.map(lambda pattern: {"pattern": pattern}),
        dependentRequired=st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
        unevaluatedProperties=inner,
    ).map(lambda more: {"type": "object", **more})
    choices = st.builds(lambda kind, given: {kind: given}, st.sampled_from(["anyOf", "oneOf", "allOf"]), several)
    tests = st.builds(lambda one, two, three: {"if": one, "then": two, "else": three}, inner, inner, inner)
    both = st.builds(lambda one, other: {**one, "not": other}, inner, inner)
    return arrays | objects | choices | tests | both


SCHEMAS = st.recursive(SIMPLE, compound, max_leaves=6)
DEFINED = {
    "a/b": {"type": "integer"},
    "string": {"enum": ["clash"]},
    "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}},
}


@settings(max_examples=100 * EXAMPLES, deadline=None)
@given(SCHEMAS)
def test_outputs_of_a_generated_schema_conform_to_it(schema: dict[str, Any]) -> None:
    try:
        check_samples({**schema, "$defs": DEFINED}, 4)
    except InvalidRequest as error:
        assert str(error).startswith(("json_schema at #", "json_schema can't be compiled", "json_schema has"))  # noqa: PT017

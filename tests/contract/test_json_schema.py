"""Every text of a schema's grammar fits the schema, or the schema is refused with its path; checked with jsonschema."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellama.config import limits
from cellama.engine.errors import GrammarFailed, InvalidRequest
from cellama.engine.grammar.automaton import Automaton, Work
from cellama.engine.grammar.json_schema import schema_to_gbnf
from cellama.engine.grammar.program import compile_grammar

MAX_BYTES = 150
CHECKS = jsonschema.Draft202012Validator.FORMAT_CHECKER
LIKED = b'"\\n:,{}[]ab10-. e'  # bytes that samples like, so that they find odd places


def automaton_of(schema: Any) -> Automaton:
    return Automaton(compile_grammar(schema_to_gbnf(json.dumps(schema)), "root"))


def accepts(schema: Any, text: str) -> bool:
    automaton, work = automaton_of(schema), Work()
    state = automaton.walk(automaton.start(work), text.encode(), work)
    return state >= 0 and automaton.accepting[state]


def sample(automaton: Automaton, random: Random) -> str | None:
    """A text of the grammar, None if it got too long."""
    work, text = Work(), bytearray()
    classes: dict[int, list[int]] = {}
    for byte, byte_class in enumerate(automaton.byte_class):
        classes.setdefault(byte_class, []).append(byte)
    state = automaton.start(work)
    while len(text) < MAX_BYTES:
        after = {each: to for each in classes if (to := automaton.step(state, each, work)) >= 0}
        if automaton.accepting[state] and (not after or random.random() < 0.3):
            return text.decode()
        following = [byte for each in after for byte in random.sample(classes[each], 1)]
        closing = [byte for byte in following if byte in b'"]},']
        liked = [byte for byte in following if byte in LIKED]
        hurry = closing and len(text) > MAX_BYTES / 4
        byte = random.choice(closing if hurry else liked if liked and random.random() < 0.6 else following)
        text.append(byte)
        state = after[automaton.byte_class[byte]]
        work.earn()
    return None


def check_samples(schema: Any, count: int = 30) -> int:
    """Samples texts, each of which must be JSON that fits the schema; returns how many there were."""
    automaton, validator = automaton_of(schema), jsonschema.Draft202012Validator(schema, format_checker=CHECKS)
    texts = [text for seed in range(count) if (text := sample(automaton, Random(seed))) is not None]
    for text in texts:
        text.encode()
        json.dumps(json.loads(text), allow_nan=False, ensure_ascii=False).encode()  # no half of a pair, no infinity
        validator.validate(json.loads(text))
    return len(texts)


NAMES = st.sampled_from(["a", "b", "ab", "root", "string", 'q"', "back\\slash", "", "é", "new\nline", "s0", "value"])
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([1.0, 0.5, -1e20, 1e-7]) | NAMES
PATTERNS = st.sampled_from(
    [
        *("^a|b$", "^.$", "a", "^[^a-c\\d]{2,3}$", "^(ab|\\d+)*$", '^"\\\\$', "^\\w+@\\w+\\.[a-z]{2}$", "b{2}|^$"),
        *("^[\\]\\-\\\\]$", "^(?:x|(y)?)z$", "^[^\\w]$", "^\\u00e9\\x41\\n\\t$", "^[a-]$", "\\/", "[^\\S]"),
        "^\\S\\s\\D\\W$",
    ]
)


def bounded(least: str, most: str, high: int) -> st.SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries({}, optional={least: st.integers(0, high), most: st.integers(0, high)})


def schemas_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda bounds, more: {"type": "array", **bounds, **more},
        bounded("minItems", "maxItems", 3),
        st.fixed_dictionaries(
            {}, optional={"items": inner | st.booleans(), "prefixItems": st.lists(inner, max_size=2)}
        ),
    )
    objects = st.builds(
        lambda properties, must, more, kind: {
            **kind,
            "properties": properties,
            "required": [name for at, name in enumerate(properties) if must[at]],
            **more,
        },
        st.dictionaries(NAMES, inner, max_size=3),
        st.tuples(*[st.booleans()] * 3),
        st.fixed_dictionaries({}, optional={"additionalProperties": inner | st.booleans()}),
        st.sampled_from([{}, {"type": "object"}, {"type": ["object", "null"]}]),
    )
    several = st.lists(inner, min_size=1, max_size=3)
    choices = st.builds(lambda kind, given: {kind: given}, st.sampled_from(["anyOf", "oneOf"]), several)
    references = st.builds(lambda given: {"$defs": {"a/b": given, "string": given}, "anyOf": [given]}, inner)
    return arrays | objects | choices | references


TYPES = ["array", "boolean", "integer", "null", "number", "object", "string"]
SIMPLE = (
    st.sampled_from(TYPES).map(lambda name: {"type": name})
    | st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True).map(lambda names: {"type": names})
    | st.lists(SCALARS | st.lists(SCALARS, max_size=2), min_size=1, max_size=4).map(lambda values: {"enum": values})
    | st.builds(
        lambda value, name: {"const": value, "type": name}, SCALARS, st.sampled_from([*TYPES, ["string", "null"]])
    )
    | bounded("minLength", "maxLength", 4).map(lambda bounds: {"type": ["string", "null"], **bounds})
    | PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern})
    | st.sampled_from(["date", "time", "date-time", "uuid"]).map(lambda name: {"type": "string", "format": name})
    | st.sampled_from(["#/$defs/string", "#/$defs/a~1b", "#/$defs/node", "#"]).map(lambda name: {"$ref": name})
)
SCHEMAS = st.recursive(SIMPLE, schemas_of, max_leaves=6)
DEFINED = {
    "a/b": {"type": "integer"},
    "string": {"enum": ["clash"]},
    "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}},
}


@settings(max_examples=200, deadline=None)
@given(SCHEMAS)
def test_texts_of_a_grammar_fit_their_schema(schema: dict[str, Any]) -> None:
    try:
        check_samples({**schema, "$defs": DEFINED}, 6)
    except InvalidRequest as error:
        assert str(error).startswith(("json_schema at #", "the grammar can't be used: rule"))  # noqa: PT017


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "list of types keeps enum": ({"type": ["string", "null"], "enum": ["a", None, 3]}, ['"a"', "null"], ["3", '"b"']),
    "list of types keeps properties": (
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ['{"a": 1}', "null"],
        ["{}", '{"a": "x"}', "1"],
    ),
    "list of types keeps items": (
        {"type": ["array", "null"], "items": {"type": "integer"}},
        ["[1]", "null"],
        ['["a"]'],
    ),
    "names do not clash": (
        {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/$defs/x"}},
            "required": ["x", "y"],
            "$defs": {"x": {"type": "boolean"}},
        },
        ['{"x": 1, "y": true}'],
        ['{"x": 1, "y": 1}', '{"x": true, "y": true}'],
    ),
    "enum with a line break": ({"enum": ["a\nb"]}, ['"a\\nb"'], ['"a\nb"']),
    "const with a tab": ({"const": "a\tb"}, ['"a\\tb"'], ['"a\tb"']),
    "alternatives bind weaker than anchors": (
        {"type": "string", "pattern": "^a|b$"},
        ['"a"', '"axx"', '"xb"'],
        ['"xa"', '"bx"'],
    ),
    "a dot is no line end": ({"type": "string", "pattern": "^.$"}, ['"a"', '"\\""', '"é"'], ['"\\n"', '""', '"ab"']),
    "additional properties are others": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
        ['{"a": 1, "b": null}', '{"ab": null, "": null}'],
        ['{"a": null}', '{"a": 1, "a": null}', '{"\\u0061": null}'],
    ),
    "items are counted": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        ["[1, 2]", "[1,2,3]"],
        ["[1]", "[]", "[1,2,3,4]"],
    ),
    "long texts are counted": ({"type": "string", "maxLength": 100_000}, [f'"{"x" * 2000}"'], []),
    "many items": (
        {"type": "array", "items": {"type": "null"}, "minItems": 0, "maxItems": 10**6},
        ["[]", "[null]"],
        [],
    ),
    "properties in order": (
        {"properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}, "required": ["b"]},
        ['{"a": null, "b": null}', '{"b":null}', '{"b": null,"c":null}'],
        ['{"a": null}', '{"a": null "b": null}', '{,"b": null}', '{"a": null,, "b": null}'],
    ),
    "recursion": (
        {"$ref": "#/$defs/node", "$defs": DEFINED},
        ['{"next": {"next": null}}', "{}"],
        ['{"next": 1}', "null"],
    ),
    "one of several that exclude each other": (
        {
            "oneOf": [
                {"properties": {"kind": {"const": name}}, "required": ["kind"], "type": "object"} for name in ("a", "b")
            ]
        },
        ['{"kind": "a"}', '{"kind": "b"}'],
        ['{"kind": "c"}', "{}"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_grammar_allows_these_and_not_those(name: str) -> None:
    schema, right, wrong = CASES[name]
    for text in right:
        assert accepts(schema, text), text
        jsonschema.validate(json.loads(text), schema)
    for text in wrong:
        assert not accepts(schema, text), text
    assert check_samples(schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "at #/type is 'objekt'; known: array, boolean"),
        (
            {"properties": {"a": {"type": "integer", "minimum": 3}}},
            "at #/properties/a/minimum: 'minimum' can't be turned",
        ),
        ({"properties": {}, "required": ["x"]}, "at #/required names 'x', which is not among the properties"),
        ({}, "at # allows anything; give it a type"),
        ({"items": {"anyOf": [{"type": "null"}, {"not": {}}]}}, "at #/items/anyOf/1/not: 'not' can't be turned"),
        ({"type": "string", "pattern": "(?=a)"}, r"at #/pattern can't be turned into a grammar: \(\?= at character"),
        ({"type": "string", "pattern": "\\bx"}, r"at #/pattern can't be turned into a grammar: \\b"),
        ({"type": "string", "format": "email"}, "at #/format is 'email'; known: date"),
        ({"$ref": "https://example.org/x.json"}, r"at #/\$ref is 'https://example.org/x.json'; only references"),
        ({"$ref": "#/$defs/missing"}, r"at #/\$ref is '#/\$defs/missing', which it does not hold"),
        ({"$ref": "#"}, "begins with itself"),
        ({"properties": {"a": 5}}, "at #/properties/a is 5; it must be a schema"),
        ({"properties": []}, r"at #/properties is \[\]; it must be an object"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "at #: minItems is 3 and maxItems is 2; nothing can be both"),
        (
            {"type": "array", "minItems": 10**9},
            "at #/minItems is 1000000000; it must be a whole number from 0 to 1000000",
        ),
        ({"type": "string", "maxLength": 1.5}, "at #/maxLength is 1.5; it must be a whole number"),
        ({"type": "null", "enum": ["a"]}, "at #/enum: there is no value of its type"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "at #/oneOf: a value may fit more than one"),
        ({"const": "\ud800"}, "json_schema is no JSON"),
        ({"const": float("inf")}, "json_schema is no JSON: Infinity is too large"),
    ],
)
def test_schema_that_cannot_be_a_grammar_is_refused_with_its_path(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        automaton_of(schema)


def nested(make: Callable[[Any], Any], depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = make(schema)
    return schema


@pytest.mark.parametrize("make", [lambda inner: {"items": inner}, lambda inner: {"anyOf": [inner, {"type": "null"}]}])
def test_nested_schema_is_taken_up_to_the_limit(make: Callable[[Any], Any]) -> None:
    automaton_of(nested(make, limits.MAX_SCHEMA_DEPTH - 1))
    for depth in (limits.MAX_SCHEMA_DEPTH, 300):
        with pytest.raises(
            InvalidRequest, match=f"nested more than {limits.MAX_SCHEMA_DEPTH} schemas deep; flatten it"
        ):
            automaton_of(nested(make, depth))
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        schema_to_gbnf('{"items":' * 50_000 + "{}" + "}" * 50_000)


def test_ambiguous_recursive_schema_ends_with_an_error_and_not_in_a_hang() -> None:
    leaf = {"type": "array", "items": {"$ref": "#"}}
    schema = {"anyOf": [leaf, {**leaf, "maxItems": 5}, {**leaf, "minItems": 0}]}
    automaton, work = automaton_of(schema), Work()
    with pytest.raises(GrammarFailed, match="the grammar is too ambiguous"):
        automaton.walk(automaton.start(work), b"[" * 10_000, work)

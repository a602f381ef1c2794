"""Hostile JSON Schemas, regular expressions and Lark grammars for `fuzz`, drawn from a seed.

Each kind of payload is extreme in some way, for example in depth, width or exponential growth, or because it allows
endless texts or no value. Most payloads are within the size limits, so the compiler and the engine must handle them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from cellama.tasks.contract.kinds.chat import TASK_CHAT
from cellama.tasks.contract.kinds.generate import TASK_GENERATE

from .hostile import HELLO, HUGE_INT, MODEL, FuzzPayload

MOST_TOKENS = 32
TIMEOUT_S = 15.0

Schema = dict[str, Any]
_NULL: Schema = {"type": "null"}
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_NUMBERS: tuple[Any, ...] = (0, -1, 1, 3, 0.1, 1e-300, 5e-324, 1e308, -1e308, 2**53 + 1, 2**63, HUGE_INT, -HUGE_INT)
_COUNTS = (0, 1, 2, 100, 10_000, 100_000, 10**6, 2**31, 2**63, HUGE_INT)
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "regex", "x")
_GUIDANCE: tuple[Any, ...] = (
    {"whitespace_pattern": "(a+)+"},
    {"item_separator": "((((", "key_separator": "(x*)*"},
    {"whitespace_flexible": True, "lenient": True},
    {"json_allowed_escapes": "zz\u0000"},
    [],
    "x",
)


def hostile_form(seed: int, number: int) -> FuzzPayload:
    """Return payload number `number`, which depends only on this number and the seed."""
    random = Random(f"forms {seed} {number}")
    make = _KINDS[number % len(_KINDS)]
    params = {
        "max_tokens": MOST_TOKENS,
        "timeout": TIMEOUT_S,
        "temperature": random.choice((0, 0.8, 2.0)),
        "seed": number,
    }
    name = f"{number} {make.__name__.lstrip('_')}"
    if make in (_regex, _lark):
        return _generate(name, params, make.__name__.lstrip("_"), make(random))
    schema = make(random)
    if random.random() < 0.1:
        schema = {**schema, "x-guidance": random.choice(_GUIDANCE)}
    if random.random() < 0.15:
        return _call(name, params, schema)
    if random.random() < 0.1:
        return _generate(name, params, "lark", f"start: %json {_json(schema)}")
    strict = {} if random.random() < 0.5 else {"strict_schema": False}
    return _generate(name, params | strict, "json_schema", _json(schema))


def _generate(name: str, params: dict[str, Any], form: str, text: str) -> FuzzPayload:
    return FuzzPayload(name, TASK_GENERATE, [MODEL, "Hi"], {**params, form: text})


def _call(name: str, params: dict[str, Any], schema: Schema) -> FuzzPayload:
    """Return a required tool call that has the schema as its parameters."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return FuzzPayload(name, TASK_CHAT, [MODEL, HELLO], {**params, "tools": [tool], "tool_choice": "f"})


def _json(schema: Schema) -> str:
    return json.dumps(schema, separators=(",", ":"))


# Schemas


def _deep(random: Random) -> Schema:
    """Return a deeply nested schema whose levels are all of one kind or of random kinds."""
    schema: Schema = {"type": random.choice(_TYPES)}
    wrap = random.choice((*_WRAPS, None))
    for _ in range(random.choice((5, 20, 60, 63, 64, 200, 400))):
        schema = (wrap or random.choice(_WRAPS))(schema)
    return schema


_WRAPS: tuple[Callable[[Schema], Schema], ...] = (
    lambda inner: {"type": "array", "items": inner},
    lambda inner: {"type": "array", "prefixItems": [inner], "minItems": 1},
    lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]},
    lambda inner: {"type": "object", "additionalProperties": inner},
    lambda inner: {"type": "object", "patternProperties": {"^a+$": inner}},
    lambda inner: {"anyOf": [inner, _NULL]},
    lambda inner: {"oneOf": [inner, {"type": "boolean"}]},
    lambda inner: {"allOf": [inner, {}]},
    lambda inner: {"not": inner},
    lambda inner: {"if": _NULL, "then": False, "else": inner},
)


def _wide(random: Random) -> Schema:
    """Return an object with as many properties of all kinds as fit into the limits."""
    count = random.choice((100, 500, 1000, 2000, 3000))
    names = [random.choice((f"p{n}", f"{'x' * 20}{n}", f"{n}")) for n in range(count)]
    required = random.choice(([], names, names[::2]))
    properties = {name: random.choice(({"type": "string"}, {"type": "integer"}, True, {}, _NULL)) for name in names}
    return {"type": "object", "properties": properties, "required": required} | random.choice(
        (
            {},
            {"additionalProperties": False},
            {"minProperties": count // 2},
            {"additionalProperties": {"type": "string"}},
        )
    )


def _doubling(random: Random) -> Schema:
    """Return definitions that each refer to the next definition twice, so each level doubles the expanded size."""
    levels, join = (
        random.choice((5, 10, 20, 40, 200)),
        random.choice(("anyOf", "oneOf", "allOf", "properties", "items")),
    )
    defs: dict[str, Any] = {f"d{levels}": random.choice((_NULL, {"type": "string"}, {"type": "object"}))}
    for level in range(levels):
        following = {"$ref": f"#/$defs/d{level + 1}"}
        if join == "properties":
            defs[f"d{level}"] = {"type": "object", "properties": {"a": following, "b": following}, "required": ["a"]}
        elif join == "items":
            defs[f"d{level}"] = {"type": "array", "prefixItems": [following, following], "items": following}
        else:
            wrapped = {"type": "array", "items": following} if random.random() < 0.3 else following
            defs[f"d{level}"] = {join: [following, wrapped]}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


def _crossing(random: Random) -> Schema:
    """Return an allOf of several anyOf schemas, so that the numbers of alternatives multiply."""
    groups, each = random.choice((2, 4, 8, 16)), random.choice((2, 5, 20))
    return {
        "allOf": [
            {
                "anyOf": [
                    {"properties": {f"g{group}": {"const": number}}, "required": [f"g{group}"]}
                    for number in range(each)
                ]
            }
            for group in range(groups)
        ]
    } | random.choice(({}, {"type": "object"}))


def _recursive(random: Random) -> Schema:
    """Return definitions with random references to other definitions and to themselves."""
    count = random.choice((1, 2, 3, 5, 20))

    def some() -> Schema:
        return {"$ref": random.choice(("#", *(f"#/$defs/d{n}" for n in range(count + 1))))}

    def one() -> Schema:
        return random.choice(
            (
                some(),
                {"anyOf": [some(), some()]},
                {"allOf": [some(), some()]},
                {"type": "array", "items": some()},
                {"type": "object", "properties": {"a": some(), "b": some()}, "required": ["a", "b"]},
                {"type": "object", "additionalProperties": some()},
                {"not": some()},
                {"anyOf": [_NULL, {"type": "array", "items": {"anyOf": [some(), some(), some()]}}]},
            )
        )

    return {"$defs": {f"d{n}": one() for n in range(count)}, **random.choice((some(), one()))}


def _contradictory(random: Random) -> Schema:
    """Return a schema that no value satisfies, either obviously or only on closer inspection."""
    low = random.choice((1, 5, 1000))
    impossible: Any = random.choice(
        (
            {"allOf": [{"type": "string"}, {"type": "integer"}]},
            {"type": "integer", "minimum": low, "maximum": -low},
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0},
            {"type": "integer", "minimum": 0.1, "maximum": 0.9},
            {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6},
            {"type": "string", "minLength": low + 1, "maxLength": low},
            {"type": "string", "pattern": "^a+$", "minLength": 2, "enum": ["b", "a"]},
            {"allOf": [{"pattern": "^a+$", "type": "string"}, {"pattern": "^b+$", "type": "string"}]},
            {"type": "string", "pattern": "^(aa)+$", "allOf": [{"pattern": "^a(aa)*$"}]},
            {"type": "array", "minItems": low + 1, "maxItems": low},
            {"type": "array", "minItems": 3, "uniqueItems": True, "items": {"enum": [1, 2]}},
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            {"type": "object", "minProperties": 3, "properties": {"a": {}}, "additionalProperties": False},
            {"enum": []},
            {"const": 1, "enum": [2]},
            {"not": {}},
            False,
        )
    )
    late = {"type": "object", "properties": {"a": {"type": "string"}, "b": impossible}, "required": ["a", "b"]}
    listed = {"type": "array", "items": impossible, "minItems": random.choice((0, 1, 100))}
    return random.choice((impossible or {"not": True}, late, listed, {"anyOf": [impossible, late]}))


def _numbers(random: Random) -> Schema:
    """Return a schema for numbers, with extreme or contradictory bounds and factors."""
    keywords = random.sample(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), 3)
    schema = {keyword: random.choice((*_NUMBERS, random.uniform(-1e9, 1e9))) for keyword in keywords}
    return {"type": random.choice(("integer", "number")), **schema}


def _counts(random: Random) -> Schema:
    """Return extreme or contradictory limits on the number of characters, items or properties."""
    kind, least, most = random.choice(
        (
            ("string", "minLength", "maxLength"),
            ("array", "minItems", "maxItems"),
            ("object", "minProperties", "maxProperties"),
        )
    )
    items = random.choice((_NULL, {"type": "string"}, {"type": "array", "minItems": 1000, "items": _NULL}))
    schema: Schema = {"type": kind, least: random.choice(_COUNTS), most: random.choice(_COUNTS)}
    if kind == "array":
        schema |= {"items": items, "uniqueItems": random.random() < 0.3}
    if kind == "object":
        schema |= {"properties": {f"p{n}": items for n in range(random.choice((0, 5, 30)))}}
    if random.random() < 0.4:
        del schema[random.choice((least, most))]
    return schema


def _patterns(random: Random) -> Schema:
    """Return a schema with one or more patterns that must all match."""
    together = [{"pattern": _explosive(random)} for _ in range(random.choice((1, 1, 2, 5)))]
    bounds = random.choice(({}, {"maxLength": 10_000}, {"minLength": 500, "maxLength": 501}))
    text: Schema = {"type": "string", **bounds, **together[0]}
    if together[1:]:
        text["allOf"] = together[1:]
    properties = {"type": "object", "patternProperties": {part["pattern"]: {"type": "integer"} for part in together}}
    return random.choice(
        (text, {"type": "array", "items": text}, properties, {"propertyNames": text, "type": "object"})
    )


def _enums(random: Random) -> Schema:
    """Return a schema whose enum lists up to 8,000 values."""
    count = random.choice((1, 100, 2000, 8000))
    value: Callable[[int], Any] = random.choice(
        (
            lambda number: f"{number}",
            lambda number: "x" * (number % 90) + str(number),
            lambda number: number * 7919,
            lambda number: number / 7,
            lambda number: [number],
            lambda number: {"a": number},
            lambda number: chr(0x4E00 + number % 20_000),
        )
    )
    values = {"enum": [value(number) for number in range(count)]}
    return random.choice(
        (
            values,
            {"type": "array", "items": values, "uniqueItems": True, "minItems": random.choice((1, 8, 2000))},
            {"allOf": [values, {"enum": [value(number) for number in range(0, count, 3)]}]},
            {"type": "array", "prefixItems": [values] * random.choice((2, 10))},
            {"not": values},
            {"type": "object", "propertyNames": values, "minProperties": 3},
        )
    )


def _refs(random: Random) -> Schema:
    """Return many references that form a chain or share one target. The last target may be missing."""
    count = random.choice((50, 500, 1500))
    if random.random() < 0.5:
        chain: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
        chain[f"d{count}"] = random.choice((_NULL, {"$ref": "#/$defs/d0"}, {"$ref": "#/nothing"}))
        return {"$defs": chain, "$ref": "#/$defs/d0"}
    to = random.choice(
        ("#/$defs/a", "#/$defs/b", "#", "#/properties/p1", "https://example.com/x.json", "#/$defs/a%25~1")
    )
    properties = {f"p{n}": {"$ref": to} for n in range(count)}
    defs = {"a": {"type": "object", "properties": {"x": {"type": "string"}}}, "a%/": _NULL}
    return {"$defs": defs, "type": "object", "properties": properties, "required": random.choice(([], ["p0"]))}


def _conditions(random: Random) -> Schema:
    """Return nested combinations of `if`, `not`, `dependencies` and similar keywords."""

    def about(number: int) -> Schema:
        return {
            "properties": {f"p{number}": random.choice(({"const": number}, {"type": "string"}))},
            "required": ["p0"],
        }

    count = random.choice((1, 5, 20, 60))
    parts = [
        random.choice(
            (
                {"if": about(n), "then": about(n + 1), "else": about(n + 2)},
                {"not": about(n)},
                {"dependentRequired": {f"p{n}": [f"p{n + 1}", "p0"]}},
                {"dependentSchemas": {f"p{n}": about(n + 1)}},
                {"oneOf": [about(n), about(n), {"not": about(n + 1)}]},
            )
        )
        for n in range(count)
    ]
    return {"type": "object", "allOf": parts, "unevaluatedProperties": random.choice((True, False))}


def _choices(random: Random) -> Schema:
    """Return an object with a minimum number of optional properties, or an array of unique items."""
    count = random.choice((5, 12, 30, 100))
    if random.random() < 0.5:
        properties = {f"p{n}": random.choice((_NULL, {"type": "integer"})) for n in range(count)}
        bounds = {"minProperties": count // 2, "maxProperties": count // 2 + random.choice((0, 1, 10))}
        return {"type": "object", "properties": properties, "additionalProperties": False, **bounds}
    items = random.choice(
        ({"enum": list(range(count))}, {"type": "boolean"}, {"type": "string"}, {"anyOf": [_NULL, {}]})
    )
    bounds = {"minItems": random.choice((2, count)), "maxItems": random.choice((2, count, 1000))}
    return {"type": "array", "items": items, "uniqueItems": True, **bounds}


def _formats(random: Random) -> Schema:
    """Return a schema that combines a format with a keyword that is rarely used with formats."""
    text = {"type": "string", "format": random.choice(_FORMATS)}
    more = random.choice(
        ({"minLength": 300}, {"maxLength": 3}, {"pattern": _explosive(random)}, {"enum": ["a", "1.2.3.4"]})
    )
    return random.choice((text | more, {"type": "array", "items": text | more, "minItems": 50}))


# Regular expressions and Lark


def _regex(random: Random) -> str:
    return random.choice((_explosive(random), "|".join(_explosive(random) for _ in range(20))))


def _explosive(random: Random) -> str:
    """Return an expression that is invalid or requires exponential time, depth or memory in some regex engines."""
    count = random.choice((3, 12, 20, 50, 1000, 10_000, 1_000_000))
    nested = random.choice((5, 50, 240, 2000))
    return random.choice(
        (
            "^(a+)+$",
            "^((a|b)*a)" + "(a|b)" * min(count, 50) + "$",
            f"^(a|b)*a(a|b){{{count}}}$",
            f"^(.*a){{{count}}}$",
            f"^((a{{1,{count}}}){{1,{count}}}){{1,{count}}}$",
            f"^[\\w.-]{{1,{count}}}@[\\w-]{{1,{count}}}\\.[a-z]{{2,{count}}}$",
            "^(" + "|".join(f"{random.randrange(10**9)}" for _ in range(min(count, 1000))) + ")$",
            "^(" + "(a?)" * min(count, 3000) + "a" * min(count, 3000) + ")$",
            "(" * nested + "a" + ")*" * nested,
            "^" + "(?=.*[a-z])(?!.*\\d\\d)" * min(count, 50) + ".*$",
            "^" + ".*" * min(count, 200) + "x$",
            "^[" + "".join(chr(0x4E00 + random.randrange(20_000)) for _ in range(min(count, 1000))) + "]+$",
            "^\\p{L}{1," + str(count) + "}\\p{Greek}*$",
            "^(?i:" + "straße" * min(count, 500) + ")$",
            "^(a|ab|abc|abcd)*(d|cd|bcd)*$",
            f"^(\\d{{1,3}},){{{count}}}\\d+$",
            "^(x+x+)+y$",
            f"^.{{{count},}}$",
            "(((((",
            "^a{5,2}$",
            "\\1(a)\\2",
            "[z-a]",
            "^\\ud800$",
            "(?<name>a)(?P=name)",
        )
    )


def _lark(random: Random) -> str:
    """Return rules with random references to each other, and difficult terminals."""
    if random.random() < 0.2:
        return random.choice(_LARK_TEXTS)(random)
    rules = ["start", *(f"r{n}" for n in range(random.choice((1, 3, 10))))]
    terminals = [f"T{n}" for n in range(random.choice((1, 3)))]
    lines = [f"{rule}: {_lark_choices(random, [*rules, *terminals], 0)}" for rule in rules]
    lines += [f"{terminal}: /{_explosive(random).strip('^$') or 'a'}/" for terminal in terminals]
    if random.random() < 0.3:
        lines += ["%ignore /[ \\t]+/"]
    return "\n".join(lines)


def _lark_choices(random: Random, names: list[str], depth: int) -> str:
    return " | ".join(
        " ".join(_lark_part(random, names, depth) for _ in range(random.randint(1, 3)))
        for _ in range(random.randint(1, 3))
    )


def _lark_part(random: Random, names: list[str], depth: int) -> str:
    parts = ['"a"', '"fox "', "/[a-z ]/", '""', "<|im_end|>", "<[5]>", "<[0-999999]>", '%json {"type":"null"}', *names]
    if depth < 3:
        parts += [f"({_lark_choices(random, names, depth + 1)})"] * 3
    part = random.choice(parts)
    return f"({part})" + random.choice(("", "", "?", "*", "+", "{2}", "{1,9}", "{0,2000}", "{1000000}", "{9,1}"))


_LARK_TEXTS: tuple[Callable[[Random], str], ...] = (
    lambda random: 'start: "a" start "x" | "a" start "y" | "a"',
    lambda random: "start: start start | " + "start " * random.choice((3, 300)) + '| "a"',
    lambda random: "start: r0\n" + "\n".join(f'r{n}: r{n + 1} "x" | r{n + 1} "y"' for n in range(40)) + '\nr40: "z"',
    lambda random: "start: " + "(" * (nested := random.choice((100, 1000, 20_000))) + '"a"' + ")" * nested,
    lambda random: "start: " + " | ".join(f'"{n}"' for n in range(random.choice((1000, 8000)))),
    lambda random: "start: " + ('("a" | "a" "a")* ' * 30) + '"b"',
    lambda random: 'start: ((("a"{1000}){1000}){1000}){1000}',
    lambda random: "start: A & B\nA: /(a|b)*a(a|b){20}/\nB: /(a|b)*b(a|b){21}/",
    lambda random: "start: A\nA: /(a|b)*a(a|b){20}/ & /(a|b)*b(a|b){21}/ & ~/(.*abba.*){3}/",
    lambda random: 'start: a\na[capture, stop=/x/]: /.*/ | a\n%llguidance { "no_forcing": true }',
    lambda random: "start: nothing",
    lambda random: "%import common.NUMBER\nstart: NUMBER+",
    lambda random: "start[lazy, max_tokens=0]: /(.*)+/",
    lambda random: 'start: %regex { "substring_chars": "' + "ab" * random.choice((10, 5000)) + '" }',
    lambda random: "start: @other",
    lambda random: "",
)

_KINDS: tuple[Callable[[Random], Any], ...] = (
    _deep,
    _wide,
    _doubling,
    _crossing,
    _recursive,
    _contradictory,
    _numbers,
    _counts,
    _patterns,
    _enums,
    _refs,
    _conditions,
    _choices,
    _formats,
    _regex,
    _lark,
    _lark,
)

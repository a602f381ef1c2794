"""Which keywords of JSON Schema are enforced, and which values each may have. Pure.

docs/reference/json-schema.md shows the table. Keywords that it doesn't have are annotations, as the specification says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

ENFORCED = "enforced"  # every output conforms
REWRITTEN = "rewritten"  # every output conforms; the schema is transformed first, and may become narrower
IGNORED = "ignored"  # an annotation
REFUSED = "refused"  # the request fails
DROPPED = "ignored, with a warning"  # outputs may violate it
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_MAX_SHOWN = 80  # characters of a value in a message

Problem = str | None  # what a value must be; None: it is right
Check = Callable[[Any], Problem]


class Keyword(NamedTuple):
    group: str
    strict: str  # the keyword's fate in strict use
    lenient: str
    check: Check
    note: str = ""
    inner: str = ""  # where it has schemas: itself, in a list, in a map, or in one of several of these


def show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _anything(_: Any) -> Problem:
    return None


def _schema(value: Any) -> Problem:
    return None if isinstance(value, Mapping | bool) else "must be a schema (an object or a boolean)"


def _schemas(value: Any) -> Problem:
    if not isinstance(value, list) or not value:
        return "must be a list of at least one schema"
    return next((f"has {show(each)}, which {_schema(each)}" for each in value if _schema(each)), None)


def _map_of_schemas(value: Any) -> Problem:
    if not isinstance(value, Mapping):
        return "must be an object"
    return next(
        (f"has {show(each)} at {show(name)}, which {_schema(each)}" for name, each in value.items() if _schema(each)),
        None,
    )


def _items(value: Any) -> Problem:
    if isinstance(value, list):
        return _schemas(value) if value else None
    return _schema(value)


def _texts(value: Any) -> Problem:
    good = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return None if good else "must be a list of texts"


def _dependencies(value: Any) -> Problem:
    if not isinstance(value, Mapping):
        return "must be an object"
    bad = (each for each in value.values() if _texts(each) and _schema(each))
    return next((f"has {show(each)}, which must be a schema or a list of texts" for each in bad), None)


def _map_of_texts(value: Any) -> Problem:
    good = isinstance(value, Mapping) and not any(map(_texts, value.values()))
    return None if good else "must be an object whose values are lists of texts"


def _type(value: Any) -> Problem:
    names = value if isinstance(value, list) else [value]
    good = names and all(isinstance(name, str) and name in TYPES for name in names)
    return None if good else f"must be one or several of {', '.join(TYPES)}"


def _number(value: Any) -> Problem:
    return None if is_number(value) else "must be a number"


def _above_zero(value: Any) -> Problem:
    return None if is_number(value) and value > 0 else "must be a number above 0"


def _bound(value: Any) -> Problem:
    return None if is_number(value) or isinstance(value, bool) else "must be a number"


def _count(value: Any) -> Problem:
    return None if is_number(value) and value >= 0 and value == int(value) else "must be a whole number from 0"


def _text(value: Any) -> Problem:
    return None if isinstance(value, str) else "must be a text"


def _boolean(value: Any) -> Problem:
    return None if isinstance(value, bool) else "must be true or false"


def _list(value: Any) -> Problem:
    return None if isinstance(value, list) and value else "must be a list of at least one value"


def _anchor(value: Any) -> Problem:
    good = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.:-]*", value)
    return None if good else "must be a name"


def _annotation(note: str = "") -> Keyword:
    return Keyword("annotations", IGNORED, IGNORED, _anything, note)


_SOME = "At most 256 alternatives may come of it."
KEYWORDS: dict[str, Keyword] = {
    # any type
    "type": Keyword(
        "any type",
        ENFORCED,
        ENFORCED,
        _type,
        "Numbers are written without an exponent: whole ones from -9007199254740991 to 9007199254740991, others within "
        "±1e15 and with at most 10 decimals, unless their bounds lie beyond. Strings have no `\\u` escapes. Without "
        "`type`, a schema with keywords of some types describes values of these types only.",
    ),
    "enum": Keyword(
        "any type",
        ENFORCED,
        ENFORCED,
        _list,
        "Values with other control characters than line breaks, tabs, `\\b` and `\\f` can't be written, nor numbers "
        "beyond ±10^18, with more than 22 decimals or more than 16 digits. They are left out.",
    ),
    "const": Keyword("any type", ENFORCED, ENFORCED, _anything, "As `enum`."),
    "nullable": Keyword(
        "any type",
        REWRITTEN,
        REWRITTEN,
        _boolean,
        "OpenAPI 3.0: null is allowed in addition to the `type`. JSON Schema itself ignores it.",
    ),
    # references
    "$ref": Keyword(
        "references",
        ENFORCED,
        ENFORCED,
        _text,
        "References within the schema, also recursive ones. References to other documents are never fetched and always "
        "refused. Keywords next to `$ref` count in every draft.",
    ),
    "$defs": Keyword("references", ENFORCED, ENFORCED, _map_of_schemas, inner="map"),
    "definitions": Keyword(
        "references", ENFORCED, ENFORCED, _map_of_schemas, "The name of `$defs` until draft 7.", "map"
    ),
    "$id": Keyword("references", ENFORCED, ENFORCED, _text, "As the target of references."),
    "$anchor": Keyword("references", ENFORCED, ENFORCED, _anchor, "As the target of references."),
    "$dynamicAnchor": Keyword("references", ENFORCED, ENFORCED, _anchor, "As `$anchor`."),
    "$dynamicRef": Keyword(
        "references",
        REWRITTEN,
        REWRITTEN,
        _text,
        "Becomes `$ref`. Refused where several `$dynamicAnchor` have its name; "
        "ignored with a warning without `strict`.",
    ),
    "$recursiveRef": Keyword("references", REWRITTEN, REWRITTEN, _text, "Becomes `$ref`."),
    # combinations
    "allOf": Keyword("combinations", REWRITTEN, REWRITTEN, _schemas, "The schemas are merged.", "list"),
    "anyOf": Keyword("combinations", ENFORCED, ENFORCED, _schemas, "", "list"),
    "oneOf": Keyword(
        "combinations",
        REWRITTEN,
        REWRITTEN,
        _schemas,
        "Alternatives that exclude each other, for instance by a property with different `const`, stay as they are. "
        "Others exclude each other as with `not`. Refused where that is impossible; "
        "without `strict` it is `anyOf` there, with a warning.",
        "list",
    ),
    "not": Keyword(
        "combinations",
        REWRITTEN,
        REWRITTEN,
        _schema,
        "Becomes alternatives for `type`, `enum`, `const`, `required`, `properties`, bounds, sizes, and combinations "
        "of these. Refused for others; ignored with a warning without `strict`.",
        "one",
    ),
    "if": Keyword(
        "combinations",
        REWRITTEN,
        REWRITTEN,
        _schema,
        "With `then` and `else`: becomes alternatives, as with `not`.",
        "one",
    ),
    "then": Keyword("combinations", REWRITTEN, REWRITTEN, _schema, "See `if`.", "one"),
    "else": Keyword("combinations", REWRITTEN, REWRITTEN, _schema, "See `if`.", "one"),
    "dependentSchemas": Keyword("combinations", REWRITTEN, REWRITTEN, _map_of_schemas, "Becomes alternatives.", "map"),
    "dependentRequired": Keyword("combinations", REWRITTEN, REWRITTEN, _map_of_texts, "Becomes alternatives."),
    "dependencies": Keyword(
        "combinations", REWRITTEN, REWRITTEN, _dependencies, "Until draft 7: as the two above.", "map or texts"
    ),
    # numbers
    "minimum": Keyword("numbers", ENFORCED, ENFORCED, _number),
    "maximum": Keyword("numbers", ENFORCED, ENFORCED, _number),
    "exclusiveMinimum": Keyword(
        "numbers", ENFORCED, ENFORCED, _bound, "A boolean, as in draft 4, makes `minimum` exclusive."
    ),
    "exclusiveMaximum": Keyword(
        "numbers", ENFORCED, ENFORCED, _bound, "A boolean, as in draft 4, makes `maximum` exclusive."
    ),
    "multipleOf": Keyword(
        "numbers",
        ENFORCED,
        ENFORCED,
        _above_zero,
        "Exact in decimals, with at most 9 digits. "
        "Validators that calculate with doubles reject some multiples of 0.1.",
    ),
    # strings
    "minLength": Keyword("strings", ENFORCED, ENFORCED, _count),
    "maxLength": Keyword("strings", ENFORCED, ENFORCED, _count),
    "pattern": Keyword(
        "strings",
        ENFORCED,
        ENFORCED,
        _text,
        "With ECMA-262's meaning of `\\d` and `\\w`. Look-around and back references are refused; without `strict` the "
        "pattern is ignored with a warning. Zod's patterns of emails and durations are enforced by their `format`.",
    ),
    "format": Keyword(
        "strings",
        ENFORCED,
        ENFORCED,
        _text,
        "The formats below, in a common spelling. Other formats are annotations. Where `format` and `pattern` can't be "
        "combined, only `pattern` is enforced.",
    ),
    # arrays
    "prefixItems": Keyword(
        "arrays",
        ENFORCED,
        ENFORCED,
        _schemas,
        "All of them are written unless `minItems` says otherwise. Without `items` no other items follow.",
        "list",
    ),
    "items": Keyword(
        "arrays", ENFORCED, ENFORCED, _items, "A list, as until draft 2019-09, is `prefixItems`.", "one or list"
    ),
    "additionalItems": Keyword(
        "arrays", ENFORCED, ENFORCED, _schema, "Until draft 2019-09: the items after a list in `items`.", "one"
    ),
    "minItems": Keyword("arrays", ENFORCED, ENFORCED, _count, "At most 1000."),
    "maxItems": Keyword(
        "arrays",
        ENFORCED,
        ENFORCED,
        _count,
        "More than 1000 is taken as 1000, and more than 50 as 50 where the grammar gets too large otherwise.",
    ),
    "uniqueItems": Keyword(
        "arrays",
        REWRITTEN,
        REWRITTEN,
        _boolean,
        "Where the items are of few values: `enum`, `const`, booleans, small ranges of integers. More than five values "
        f"come in the order of the schema. {_SOME} Refused for other items; ignored with a warning without `strict`.",
    ),
    "contains": Keyword(
        "arrays",
        REWRITTEN,
        REWRITTEN,
        _schema,
        f"One of the first items has to match. {_SOME} Refused with `maxContains`; "
        "ignored with a warning without `strict`.",
        "one",
    ),
    "minContains": Keyword("arrays", REWRITTEN, REWRITTEN, _count, "See `contains`."),
    "maxContains": Keyword("arrays", REFUSED, DROPPED, _count),
    "unevaluatedItems": Keyword("arrays", REWRITTEN, REWRITTEN, _schema, "Becomes `items`.", "one"),
    # objects
    "properties": Keyword("objects", ENFORCED, ENFORCED, _map_of_schemas, "Always in the order of the schema.", "map"),
    "required": Keyword("objects", ENFORCED, ENFORCED, _texts),
    "additionalProperties": Keyword(
        "objects",
        ENFORCED,
        ENFORCED,
        _schema,
        "Additional properties come last. Without this keyword, an object with `properties` or `patternProperties` "
        "has no others. A key may come twice, both times with a value that conforms.",
        "one",
    ),
    "patternProperties": Keyword(
        "objects",
        ENFORCED,
        ENFORCED,
        _map_of_schemas,
        "Where a key may match several patterns, values have to conform to the schemas of all of them.",
        "map",
    ),
    "propertyNames": Keyword(
        "objects",
        REWRITTEN,
        REWRITTEN,
        _schema,
        "Names by `enum`, `const`, `pattern`, `format` or length. Refused for combinations of these; "
        "ignored with a warning without `strict`.",
        "one",
    ),
    "minProperties": Keyword(
        "objects",
        REWRITTEN,
        REWRITTEN,
        _count,
        f"Becomes alternatives of required properties. {_SOME} At most one additional property can be demanded; more "
        "are refused, or ignored with a warning without `strict`.",
    ),
    "maxProperties": Keyword(
        "objects",
        REWRITTEN,
        REWRITTEN,
        _count,
        f"Becomes alternatives. {_SOME} Together with optional `properties`, additional ones are left out.",
    ),
    "unevaluatedProperties": Keyword(
        "objects", REWRITTEN, REWRITTEN, _schema, "Becomes `additionalProperties` of every alternative.", "one"
    ),
    # annotations
    "$schema": _annotation("Every schema is read as draft 2020-12, with the older spellings of this table."),
    "$comment": _annotation(),
    "$vocabulary": _annotation(),
    "$recursiveAnchor": _annotation(),
    "title": _annotation(),
    "description": _annotation(),
    "default": _annotation(),
    "examples": _annotation(),
    "deprecated": _annotation(),
    "readOnly": _annotation(),
    "writeOnly": _annotation(),
    "contentEncoding": _annotation(),
    "contentMediaType": _annotation(),
    "contentSchema": _annotation(),
    "discriminator": _annotation("Of OpenAPI."),
    "x-guidance": _annotation("Options of llguidance have no effect in a request."),
}
ANNOTATIONS = frozenset(name for name, keyword in KEYWORDS.items() if keyword.group == "annotations")
# What says nothing of a value by itself.
SILENT = ANNOTATIONS | {"$defs", "definitions", "$id", "$anchor", "$dynamicAnchor"}

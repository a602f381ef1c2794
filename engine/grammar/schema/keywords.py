"""Define how each JSON Schema keyword is handled, and which values it may have.

docs/reference/json-schema.md shows the table of keywords. Keywords that are not in the table are annotations, as the
specification requires.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

ENFORCED = "enforced"  # every output conforms
REWRITTEN = "rewritten"  # every output conforms; the schema is transformed first, and may become narrower
IGNORED = "ignored"  # annotations have no effect
REFUSED = "rejected"  # the request fails
DROPPED = "ignored, with a warning"  # outputs may violate it
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_MAX_SHOWN = 80  # characters of a value in a message

Problem = str | None  # the requirement that a value violates; None: it is valid
Check = Callable[[Any], Problem]


class Keyword(NamedTuple):
    group: str
    strict: str  # handling in strict mode
    lenient: str  # handling in lenient mode
    check: Check
    note: str = ""
    inner: str = ""  # where its value contains schemas: one, list, map, one or list, map or strings


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


def _strings(value: Any) -> Problem:
    good = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return None if good else "must be a list of strings"


def _dependencies(value: Any) -> Problem:
    if not isinstance(value, Mapping):
        return "must be an object"
    bad = (each for each in value.values() if _strings(each) and _schema(each))
    return next((f"has {show(each)}, which must be a schema or a list of strings" for each in bad), None)


def _map_of_strings(value: Any) -> Problem:
    good = isinstance(value, Mapping) and not any(map(_strings, value.values()))
    return None if good else "must be an object whose values are lists of strings"


def _type(value: Any) -> Problem:
    names = value if isinstance(value, list) else [value]
    good = names and all(isinstance(name, str) and name in TYPES for name in names)
    return None if good else f"must be one or more of {', '.join(TYPES)}"


def _number(value: Any) -> Problem:
    return None if is_number(value) else "must be a number"


def _above_zero(value: Any) -> Problem:
    return None if is_number(value) and value > 0 else "must be a number above 0"


def _bound(value: Any) -> Problem:
    return None if is_number(value) or isinstance(value, bool) else "must be a number"


def _count(value: Any) -> Problem:
    return None if is_number(value) and value >= 0 and value == int(value) else "must be a whole number of at least 0"


def _string(value: Any) -> Problem:
    return None if isinstance(value, str) else "must be a string"


def _boolean(value: Any) -> Problem:
    return None if isinstance(value, bool) else "must be true or false"


def _list(value: Any) -> Problem:
    return None if isinstance(value, list) and value else "must be a list of at least one value"


def _anchor(value: Any) -> Problem:
    good = isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.:-]*", value)
    return None if good else "must be a name"


def _enforced(group: str, check: Check, note: str = "", *, inner: str = "") -> Keyword:
    return Keyword(group, strict=ENFORCED, lenient=ENFORCED, check=check, note=note, inner=inner)


def _rewritten(group: str, check: Check, note: str = "", *, inner: str = "") -> Keyword:
    return Keyword(group, strict=REWRITTEN, lenient=REWRITTEN, check=check, note=note, inner=inner)


def _annotation(note: str = "") -> Keyword:
    return Keyword("annotations", strict=IGNORED, lenient=IGNORED, check=_anything, note=note)


_LIMIT = "The rewrite may need at most 256 alternatives."
_LENIENT = "lenient mode ignores it with a warning."
KEYWORDS: dict[str, Keyword] = {
    # any type
    "type": _enforced(
        "any type",
        _type,
        "Numbers are written without an exponent. Integers range from -9007199254740991 to 9007199254740991. Other "
        "numbers lie within ±1e15 and have at most 10 decimals. Wider bounds in the schema extend these ranges. "
        "Strings have no `\\u` escapes. Without `type`, a schema with keywords for some types allows only values of "
        "these types.",
    ),
    "enum": _enforced(
        "any type",
        _list,
        "Values that can't be written are removed: strings with control characters other than line breaks, tabs, `\\b` "
        "and `\\f`, and numbers beyond ±10^18, with more than 22 decimals or with more than 16 digits.",
    ),
    "const": _enforced("any type", _anything, "The limits of `enum` apply."),
    "nullable": _rewritten(
        "any type",
        _boolean,
        "As in OpenAPI 3.0, null is allowed in addition to the `type`. JSON Schema itself ignores this keyword.",
    ),
    # references
    "$ref": _enforced(
        "references",
        _string,
        "References may lead to any schema of the document and may be recursive. References to other documents are "
        "always rejected, and never fetched. Keywords next to `$ref` apply in every draft.",
    ),
    "$defs": _enforced("references", _map_of_schemas, inner="map"),
    "definitions": _enforced("references", _map_of_schemas, "The name of `$defs` until draft 7.", inner="map"),
    "$id": _enforced("references", _string, "It can be the target of references."),
    "$anchor": _enforced("references", _anchor, "It can be the target of references."),
    "$dynamicAnchor": _enforced("references", _anchor, "It is treated as `$anchor`."),
    "$dynamicRef": _rewritten(
        "references",
        _string,
        "It is treated as `$ref`. If several `$dynamicAnchor` keywords have its name, strict mode rejects it, and "
        f"{_LENIENT}",
    ),
    "$recursiveRef": _rewritten("references", _string, "It is treated as `$ref`."),
    # combinations
    "allOf": _rewritten("combinations", _schemas, "The schemas are merged into one.", inner="list"),
    "anyOf": _enforced("combinations", _schemas, inner="list"),
    "oneOf": _rewritten(
        "combinations",
        _schemas,
        "Alternatives that exclude each other, for instance by a property with a different `const`, stay unchanged. "
        "Other alternatives are combined with `not`. Where that is impossible, strict mode rejects the keyword, and "
        "lenient mode treats it as `anyOf` with a warning.",
        inner="list",
    ),
    "not": _rewritten(
        "combinations",
        _schema,
        "`type`, `enum`, `const`, `required`, `properties`, bounds, sizes, and combinations of these can be negated. "
        f"If another keyword is negated, strict mode rejects `not`, and {_LENIENT}",
        inner="one",
    ),
    "if": _rewritten(
        "combinations",
        _schema,
        "Together with `then` and `else`, it becomes alternatives. The limits of `not` apply.",
        inner="one",
    ),
    "then": _rewritten("combinations", _schema, "See `if`.", inner="one"),
    "else": _rewritten("combinations", _schema, "See `if`.", inner="one"),
    "dependentSchemas": _rewritten("combinations", _map_of_schemas, "It becomes alternatives.", inner="map"),
    "dependentRequired": _rewritten("combinations", _map_of_strings, "It becomes alternatives."),
    "dependencies": _rewritten(
        "combinations",
        _dependencies,
        "The name of `dependentSchemas` and `dependentRequired` until draft 7.",
        inner="map or strings",
    ),
    # numbers
    "minimum": _enforced("numbers", _number),
    "maximum": _enforced("numbers", _number),
    "exclusiveMinimum": _enforced("numbers", _bound, "A boolean, as in draft 4, makes `minimum` exclusive."),
    "exclusiveMaximum": _enforced("numbers", _bound, "A boolean, as in draft 4, makes `maximum` exclusive."),
    "multipleOf": _enforced(
        "numbers",
        _above_zero,
        "Multiples are exact decimals, and `multipleOf` may have at most 9 digits. "
        "Validators that calculate with doubles reject some multiples of 0.1.",
    ),
    # strings
    "minLength": _enforced("strings", _count),
    "maxLength": _enforced("strings", _count),
    "pattern": _enforced(
        "strings",
        _string,
        "`\\d` and `\\w` have the meaning of ECMA-262. Strict mode rejects look-around and back references, and "
        "lenient mode ignores such patterns with a warning. Zod's patterns for emails and durations are enforced by "
        "their `format`.",
    ),
    "format": _enforced(
        "strings",
        _string,
        "The formats below are enforced in a common spelling. Other formats are annotations. Where `format` and "
        "`pattern` can't be combined, only `pattern` is enforced.",
    ),
    # arrays
    "prefixItems": _enforced(
        "arrays",
        _schemas,
        "All of these items are written unless `minItems` allows fewer. Without `items`, no other items follow.",
        inner="list",
    ),
    "items": _enforced(
        "arrays", _items, "A list, as in drafts before 2020-12, is treated as `prefixItems`.", inner="one or list"
    ),
    "additionalItems": _enforced(
        "arrays", _schema, "Before draft 2020-12: the items after a list in `items`.", inner="one"
    ),
    "minItems": _enforced("arrays", _count, "The maximum is 1000."),
    "maxItems": _enforced(
        "arrays",
        _count,
        "Values above 1000 are reduced to 1000. If the grammar would otherwise be too large, values above 50 are "
        "reduced to 50.",
    ),
    "uniqueItems": _rewritten(
        "arrays",
        _boolean,
        "The items must have few possible values: `enum`, `const`, booleans or a small range of integers. More than "
        f"five values are written in the order of the schema. {_LIMIT} For other items, strict mode rejects it, and "
        f"{_LENIENT}",
    ),
    "contains": _rewritten(
        "arrays",
        _schema,
        f"One of the first items matches. {_LIMIT} With `maxContains`, strict mode rejects it, and {_LENIENT}",
        inner="one",
    ),
    "minContains": _rewritten("arrays", _count, "See `contains`."),
    "maxContains": Keyword("arrays", strict=REFUSED, lenient=DROPPED, check=_count),
    "unevaluatedItems": _rewritten("arrays", _schema, "It is treated as `items`.", inner="one"),
    # objects
    "properties": _enforced("objects", _map_of_schemas, "They are written in the order of the schema.", inner="map"),
    "required": _enforced("objects", _strings),
    "additionalProperties": _enforced(
        "objects",
        _schema,
        "Additional properties follow all others. Without this keyword, an object with `properties` or "
        "`patternProperties` has no additional properties. A key may occur twice, if both values conform.",
        inner="one",
    ),
    "patternProperties": _enforced(
        "objects",
        _map_of_schemas,
        "If a key may match several patterns, its value conforms to all of their schemas.",
        inner="map",
    ),
    "propertyNames": _rewritten(
        "objects",
        _schema,
        "Names can be limited by one of `enum`, `const`, `pattern`, `format` and length. For combinations of these, "
        f"strict mode rejects it, and {_LENIENT}",
        inner="one",
    ),
    "minProperties": _rewritten(
        "objects",
        _count,
        f"It becomes alternatives of required properties. {_LIMIT} It can require at most one additional property. For "
        f"more, strict mode rejects it, and {_LENIENT}",
    ),
    "maxProperties": _rewritten(
        "objects",
        _count,
        f"It becomes alternatives. {_LIMIT} If `properties` has optional ones, additional properties are not allowed.",
    ),
    "unevaluatedProperties": _rewritten(
        "objects", _schema, "It is treated as `additionalProperties` of each alternative.", inner="one"
    ),
    # annotations
    "$schema": _annotation("Every schema is read as draft 2020-12, with the older spellings in this table."),
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
    "discriminator": _annotation("An OpenAPI keyword."),
    "x-guidance": _annotation("llguidance's options have no effect in a request."),
}

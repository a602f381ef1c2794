"""GBNF of JSON values, and the types that JSON Schema tells apart. Pure.

Numbers have so few digits that all of them are finite; strings never hold half of a surrogate pair.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_HEX = "[0-9a-fA-F]"
_DATE = (
    '[1-9] [0-9]{3} "-" (("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01]) '
    '| ("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30") | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8]))'
)
_CLOCK = '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9]'
_TIME = f'{_CLOCK} ":" [0-5] [0-9] ("." [0-9]{{1,6}})? ("Z" | [+-] {_CLOCK})'

JSON_RULES = (
    'ws ::= (" " | "\\n" [ \\t]{0,20})?',
    'plain ::= [^"\\\\\\x00-\\x1F\\x7F]',
    'char ::= plain | "\\\\" (["\\\\/bfnrt] | "u" unit)',
    f"unit ::= ([0-9a-cA-CefEF] {_HEX} | [dD] [0-7]) {_HEX}{{2}} "
    f'| [dD] [89abAB] {_HEX}{{2}} "\\\\u" [dD] [c-fC-F] {_HEX}{{2}}',
    'string ::= "\\"" char* "\\""',
    'integer ::= "-"? ("0" | [1-9] [0-9]{0,15})',
    'number ::= integer ("." [0-9]{1,16})? ([eE] [+-]? [0-9]{1,2})?',
    'boolean ::= "true" | "false"',
    'null ::= "null"',
    'array ::= "[" ws (value ws ("," ws value ws)*)? "]"',
    'object ::= "{" ws (string ws ":" ws value ws ("," ws string ws ":" ws value ws)*)? "}"',
    "value ::= string | number | boolean | null | array | object",
    f'format-date ::= "\\"" {_DATE} "\\""',
    f'format-time ::= "\\"" {_TIME} "\\""',
    f'format-date-time ::= "\\"" {_DATE} "T" {_TIME} "\\""',
    f'format-uuid ::= "\\"" {_HEX}{{8}} ("-" {_HEX}{{4}}){{3}} "-" {_HEX}{{12}} "\\""',
)
VALUE_OF_TYPE = {name: name for name in ("integer", "number", "boolean", "null")}


def type_of(value: Any) -> set[str]:
    """The types that a parsed value is of; a whole number is of two."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"integer", "number"} if value == int(value) else {"number"}
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def is_plain(char: str) -> bool:
    """True for what a JSON string holds as it is."""
    return char >= " " and char not in '"\\\x7f'


def characters_but(chars: Iterable[str]) -> str:
    """GBNF of a character that a JSON string holds as it is, and that is none of these."""
    listed = "".join(f"\\U{ord(char):08x}" for char in chars)
    return f'[^"\\\\\\x00-\\x1F\\x7F{listed}]'


FORMATS = [rule.split()[0] for rule in JSON_RULES if rule.startswith("format-")]


def listed(first: list[str], item: str, least: int, most: int | None) -> str:
    """Values with commas between: these first, then from `least` to `most` items."""
    if first:
        begin = ' "," ws '.join(f"{each} ws" for each in first)
        return begin if most == 0 else f'{begin} ("," ws {item} ws){times(least, most)}'
    if most == 0:
        return '""'
    rest = f'{item} ws ("," ws {item} ws){times(max(least - 1, 0), None if most is None else most - 1)}'
    return rest if least else f"({rest})?"


def times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"

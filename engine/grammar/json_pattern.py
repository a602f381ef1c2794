"""Regular expressions of JSON Schemas → GBNF of the JSON strings that match them, or fewer. Pure.

ECMAScript and Python disagree on what some classes hold (`\\w`, `\\s`, `.`); what is allowed here matches in both.
Control characters are only allowed where the pattern names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .gbnf import MAX_CODE_POINT, complement, merged

Ranges = list[tuple[int, int]]

_MAX_DEPTH = 32  # groups in groups
_BEYOND_ASCII = (0x80, MAX_CODE_POINT)
_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Ranges = [(0x09, 0x0D), (0x20, 0x20)]
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": [*_SPACE, (0x1C, 0x1F)]}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_UNPRINTABLE: Ranges = [(0, 0x1F), (0x7F, 0x9F), (0xD800, 0xDFFF)]
_JSON_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_QUANTIFIER = re.compile(r"(?:([*+?])|\{([0-9]+)(,([0-9]*))?\})\??")


class UnknownPattern(ValueError):
    """The pattern has something that a grammar can't say; the text names it."""


def pattern_to_gbnf(pattern: str) -> str:
    """GBNF of what may stand between the quotes of a JSON string. It refers to a rule `char`. Raises UnknownPattern."""
    return _Parser(pattern).whole()


def literal(text: str) -> str:
    """GBNF of this very text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def characters(ranges: Ranges) -> str:
    """GBNF of one character of these, as JSON writes it in a string."""
    plain, parts = [], []
    for low, high in merged(ranges):
        for code in range(low, min(high, 0x7F) + 1):
            char = chr(code)
            if char in _JSON_ESCAPES or code < 0x20:
                parts.append(literal(_JSON_ESCAPES.get(char, f"\\u{code:04x}")))
            else:
                plain.append((code, code))
        if high > 0x7F:
            plain.append((max(low, 0x80), high))
    shown = merged([each for low, high in plain for each in _without_surrogates(low, high)])
    if shown:
        parts.insert(0, "[" + "".join(_range(low, high) for low, high in shown) + "]")
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def _without_surrogates(low: int, high: int) -> Iterator[tuple[int, int]]:
    for first, last in ((0, 0xD7FF), (0xE000, MAX_CODE_POINT)):
        if low <= last and first <= high:
            yield max(low, first), min(high, last)


def _range(low: int, high: int) -> str:
    return _escape(low) if low == high else f"{_escape(low)}-{_escape(high)}"


def _escape(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\U{code:08x}"


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    return list(complement([*complement(ranges), *others]))


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> str:
        """The pattern is looked for anywhere, but where it is anchored."""
        parts = []
        while True:
            begins = self._take("^")
            inner = self._sequence()
            ends = self._take("$")
            parts.append(" ".join(filter(None, ("" if begins else "char*", inner, "" if ends else "char*"))) or '""')
            if not self._take("|"):
                break
        if self._at < len(self._text):
            raise self._unknown(self._text[self._at])
        return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"

    def _choice(self) -> str:
        parts = [self._sequence() or '""']
        while self._take("|"):
            parts.append(self._sequence() or '""')
        return f"({' | '.join(parts)})"

    def _sequence(self) -> str:
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)$":
            parts.append(self._atom() + self._quantifier())
        return " ".join(parts)

    def _quantifier(self) -> str:
        found = _QUANTIFIER.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        if self._at < len(self._text) and self._text[self._at] in "*+?{":
            raise self._unknown(f"{found.group()}{self._text[self._at]}")
        sign, least, comma, most = found.groups()
        return sign or f"{{{least}{',' if comma else ''}{most or ''}}}"

    def _atom(self) -> str:
        char = self._next()
        match char:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return characters(list(complement([*_LINE_ENDS, *_UNPRINTABLE])))
            case "\\":
                certain, _ = self._escaped()
                return characters(certain)
            case "^" | "*" | "+" | "?" | "{" | "}" | "]":
                raise self._unknown(char)
            case _:
                return characters([(ord(char), ord(char))])

    def _group(self) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnknownPattern(f"more than {_MAX_DEPTH} groups in each other")
        if self._take("?"):
            named = re.compile(r"<[A-Za-z_]\w*>").match(self._text, self._at)
            if named is not None:
                self._at = named.end()
            elif not self._take(":"):
                raise self._unknown(f"(?{self._text[self._at : self._at + 1]}")
        inner = self._choice()
        if not self._take(")"):
            raise self._unknown(self._text[self._at : self._at + 1] or "( without )")
        self._depth -= 1
        return inner

    def _class(self) -> str:
        negated = self._take("^")
        certain: Ranges = []
        possible: Ranges = []
        while not self._take("]"):
            low = self._member()
            high = low
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._member()
                low, high = _as_range(low, high)
            certain += [(low[0][0][0], high[0][0][1])] if low is not high else low[0]
            possible += [(low[1][0][0], high[1][0][1])] if low is not high else low[1]
        ranges = _without(list(complement(possible)), _UNPRINTABLE) if negated else certain
        if not ranges:
            raise UnknownPattern("a class without characters")
        return characters(ranges)

    def _member(self) -> tuple[Ranges, Ranges]:
        char = self._next()
        if char == "\\":
            return self._escaped(in_class=True)
        return [(ord(char), ord(char))], [(ord(char), ord(char))]

    def _escaped(self, *, in_class: bool = False) -> tuple[Ranges, Ranges]:
        """The characters that an escape matches for certain, and those that it may match."""
        char = self._next()
        if char.lower() in _CLASSES:
            certain = {"d": _DIGITS, "w": _WORD, "s": _SPACE}[char.lower()]
            possible = [*_CLASSES[char.lower()], _BEYOND_ASCII]
            if char.isupper():
                return _without([(0x20, 0x7E)], possible), list(complement(certain))
            return certain, possible
        if char in "xu":
            size = 2 if char == "x" else 4
            digits = self._text[self._at : self._at + size]
            if not re.fullmatch(f"[0-9a-fA-F]{{{size}}}", digits) or 0xD800 <= int(digits, 16) <= 0xDFFF:
                raise self._unknown(f"\\{char}{digits}")
            self._at += size
            code = int(digits, 16)
        elif char in _CONTROLS:
            code = _CONTROLS[char]
        elif char == "b" and in_class:
            code = 8
        elif char.isalnum() or ord(char) > 0x7F:
            raise self._unknown(f"\\{char}")
        else:
            code = ord(char)
        return [(code, code)], [(code, code)]

    def _take(self, char: str) -> bool:
        if self._text.startswith(char, self._at):
            self._at += 1
            return True
        return False

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise UnknownPattern("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _unknown(self, what: str) -> UnknownPattern:
        return UnknownPattern(f"{what} at character {self._at}")


def _as_range(low: tuple[Ranges, Ranges], high: tuple[Ranges, Ranges]) -> tuple[tuple[Ranges, Ranges], ...]:
    ends = (low[0], high[0])
    if not all(len(each) == 1 and each[0][0] == each[0][1] for each in ends) or high[0][0][0] < low[0][0][0]:
        raise UnknownPattern("a range in a class whose ends are no characters in order")
    return low, high

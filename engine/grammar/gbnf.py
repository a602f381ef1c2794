"""Parse GBNF, llama.cpp's grammar format (see its grammars/README.md), into a tree.

Token ids are not supported. The nodes of the tree are:

GbnfSequence     parts, one after another
GbnfChoice       one of its parts
GbnfChars        one character of these ranges
GbnfRepeat       a part, from `min_count` to `max_count` times (None: without a limit)
GbnfReference    the rule of this name
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cellama.config import limits
from cellama.engine.errors import InvalidRequest

MAX_CODE_POINT = 0x10FFFF
_MAX_SUFFIXES = 3  # maximum number of repetition operators after one part; for example, "a"*? has two
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_REPEAT = re.compile(r"\{[ \t\r\n]*([0-9]+)[ \t\r\n]*(,)?[ \t\r\n]*([0-9]+)?[ \t\r\n]*\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}
_SUFFIXES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True, slots=True)
class GbnfChars:
    ranges: tuple[tuple[int, int], ...]  # code points, in order and without overlaps


@dataclass(frozen=True, slots=True)
class GbnfReference:
    name: str


@dataclass(frozen=True, slots=True)
class GbnfSequence:
    parts: tuple[GbnfPart, ...]


@dataclass(frozen=True, slots=True)
class GbnfChoice:
    parts: tuple[GbnfPart, ...]


@dataclass(frozen=True, slots=True)
class GbnfRepeat:
    part: GbnfPart
    min_count: int
    max_count: int | None


GbnfPart = GbnfSequence | GbnfChoice | GbnfChars | GbnfRepeat | GbnfReference


def parse(text: str) -> dict[str, GbnfPart]:
    """Return the rules of a grammar, keyed by name.

    A later rule replaces an earlier rule with the same name. Raises InvalidRequest if the grammar is malformed.
    """
    if len(text) > limits.MAX_GRAMMAR_CHARS:
        raise grammar_error(f"{len(text)} characters exceed the limit of {limits.MAX_GRAMMAR_CHARS}")
    return _Parser(text).rules()


def grammar_error(reason: str) -> InvalidRequest:
    """Return an InvalidRequest error for a grammar that can't be used."""
    return InvalidRequest(f"the grammar can't be used: {reason}; see llama.cpp's grammars/README.md")


class _Parser:
    """A recursive descent parser for GBNF."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0  # open parentheses

    def rules(self) -> dict[str, GbnfPart]:
        found: dict[str, GbnfPart] = {}
        self._skip(_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME, "the name of a rule")
            self._skip(_SPACE)
            self._expect("::=")
            self._skip(_LINES)
            found[name] = self._choice()
            if self._at < len(self._text) and self._peek() not in "\r\n":
                raise self._error("expected the end of the line")
            self._skip(_LINES)
        if not found:
            raise grammar_error("no rules found")
        return found

    def _choice(self) -> GbnfPart:
        parts = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            self._skip(_LINES)
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else GbnfChoice(tuple(parts))

    def _sequence(self) -> GbnfPart:
        parts: list[GbnfPart] = []
        while (part := self._part()) is not None:
            parts.append(part)
        return parts[0] if len(parts) == 1 else GbnfSequence(tuple(parts))

    def _part(self) -> GbnfPart | None:
        start = self._peek()
        if start == '"':
            part: GbnfPart = self._literal()
        elif start == "[":
            part = self._class()
        elif start == ".":
            self._at += 1
            part = GbnfChars(((0, MAX_CODE_POINT),))
        elif start == "(":
            part = self._group()
        elif start and _NAME.match(start):
            part = GbnfReference(self._match(_NAME, "the name of a rule"))
        elif start and start in "<!":
            raise self._error("token ids are not supported (write the token's text instead)")
        elif start and start in "*+?{":
            raise self._error(f"{start!r} has nothing to repeat")
        else:
            return None
        self._skip_inside()
        return self._repeated(part)

    def _repeated(self, part: GbnfPart) -> GbnfPart:
        for _ in range(_MAX_SUFFIXES):
            suffix = self._peek()
            if suffix and suffix in _SUFFIXES:
                self._at += 1
                part = GbnfRepeat(part, *_SUFFIXES[suffix])
            elif suffix == "{":
                part = GbnfRepeat(part, *self._times())
            else:
                return part
            self._skip_inside()
        if self._peek() and self._peek() in "*+?{":
            raise self._error(f"one part has more than {_MAX_SUFFIXES} repetition operators")
        return part

    def _times(self) -> tuple[int, int | None]:
        found = _REPEAT.match(self._text, self._at)
        if found is None:
            raise self._error("expected {m}, {m,} or {m,n}")
        limit = limits.MAX_GRAMMAR_REPEATS
        if any(len(digits) > 9 or int(digits) > limit for digits in found.group(1, 3) if digits):
            raise self._error(f"more than {limit} repetitions are not supported")
        min_count = int(found.group(1))
        max_count = int(found.group(3)) if found.group(3) else None if found.group(2) else min_count
        if max_count is not None and max_count < min_count:
            raise self._error("n is less than m in {m,n}")
        self._at = found.end()
        return min_count, max_count

    def _group(self) -> GbnfPart:
        self._at += 1
        self._depth += 1
        if self._depth > limits.MAX_GRAMMAR_DEPTH:
            raise self._error(f"parentheses are nested more than {limits.MAX_GRAMMAR_DEPTH} levels deep")
        self._skip(_LINES)
        part = self._choice()
        self._expect(")")
        self._depth -= 1
        return part

    def _literal(self) -> GbnfPart:
        self._at += 1
        parts: list[GbnfPart] = []
        while self._peek() != '"':
            code = self._char()
            parts.append(GbnfChars(((code, code),)))
        self._at += 1
        return parts[0] if len(parts) == 1 else GbnfSequence(tuple(parts))

    def _class(self) -> GbnfChars:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = high = self._char()
            if self._peek() == "-" and self._peek(1) not in ("]", ""):
                self._at += 1
                high = self._char()
            if high < low:
                raise self._error("a range of characters is reversed")
            ranges.append((low, high))
        if not ranges:
            raise self._error("the character class is empty")
        self._at += 1
        return GbnfChars(complement(ranges) if negated else merge_ranges(ranges))

    def _char(self) -> int:
        char = self._peek()
        if not char:
            raise self._error("unterminated string or character class")
        self._at += 1
        if char != "\\":
            return self._checked(ord(char))
        kind = self._peek()
        self._at += 1
        if kind in _HEX:
            digits = self._text[self._at : self._at + _HEX[kind]]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX[kind]}}}", digits):
                raise self._error(f"expected {_HEX[kind]} hexadecimal digits")
            self._at += _HEX[kind]
            return self._checked(int(digits, 16))
        if not kind or kind not in _ESCAPES:
            raise self._error(f"unknown escape \\{kind}")
        return ord(_ESCAPES[kind])

    def _checked(self, code: int) -> int:
        if code > MAX_CODE_POINT or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"{code:#x} is not a character")
        return code

    def _peek(self, ahead: int = 0) -> str:
        return self._text[self._at + ahead : self._at + ahead + 1]

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _skip_inside(self) -> None:
        """Skip whitespace after a part. Within parentheses, line breaks count as whitespace."""
        self._skip(_LINES if self._depth else _SPACE)

    def _match(self, pattern: re.Pattern[str], expected: str) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(f"expected {expected}")
        self._at = found.end()
        return found.group()

    def _expect(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise self._error(f"expected {text!r}")
        self._at += len(text)

    def _error(self, reason: str) -> InvalidRequest:
        line = self._text.count("\n", 0, self._at) + 1
        near = self._text[self._at : self._at + 20]
        return grammar_error(f"{reason} in line {line}" + (f", at {near!r}" if near else ", at the end"))


def merge_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sort these character ranges, and merge overlapping and adjacent ones."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(result[-1][1], high))
        else:
            result.append((low, high))
    return tuple(result)


def complement(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of all characters that are not in these ranges."""
    gaps, start = [], 0
    for low, high in merge_ranges(ranges):
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    return (*gaps, (start, MAX_CODE_POINT)) if start <= MAX_CODE_POINT else tuple(gaps)

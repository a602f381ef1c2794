"""Compare, split and match literals, such as tags, that a template writes around a caller's words.

A literal may contain slots for text that varies between calls: the tool's name, an id, a counter or a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

NAME, ID, INDEX, KEY = "\ue000", "\ue001", "\ue002", "\ue003"
SLOTS = frozenset((NAME, ID, INDEX, KEY))
TAG = re.compile(r"<[^<>\n]{1,80}>|\[/?[A-Z][A-Z_ ]{1,40}\]")
_PIECE = re.compile(rf"{TAG.pattern}|[^\s<\[]+|[<\[]")
_CLASSES = {NAME: r"[^\s<>\"{}]+", ID: r"[\w.:\-]*", INDEX: r"\d+", KEY: r"[^<>\n]+"}
_HALVES = re.compile(r"start|begin|open|end|close|[^a-z0-9]")


def shared_start(first: str, second: str) -> str:
    """Return the longest common prefix of both texts that doesn't end inside a tag."""
    at = num_shared(first, second)
    return first[: min(_outside(first, at)[0], _outside(second, at)[0])]


def shared_end(first: str, second: str) -> str:
    """Return the longest common suffix of both texts that doesn't start inside a tag."""
    size = num_shared(first[::-1], second[::-1])
    sizes = (len(text) - _outside(text, len(text) - size)[1] for text in (first, second))
    return first[len(first) - min(sizes) :]


def num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of both sequences."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _outside(text: str, at: int) -> tuple[int, int]:
    """Return the nearest positions before and after `at` that are not inside a tag."""
    for tag in TAG.finditer(text, max(0, at - 82)):
        if tag.start() < at < tag.end():
            return tag.start(), tag.end()
        if tag.start() >= at:
            break
    return at, at


def tags_of(text: str) -> list[str]:
    return TAG.findall(text)


def pieces_of(literal: str) -> list[str]:
    """Return the tags in a literal and the words between them."""
    return _PIECE.findall(literal)


def is_pair(opening: str, closing: str) -> bool:
    """Return True if two tags form a pair, such as `<think>` and `</think>`, or `<|START_X|>` and `<|END_X|>`."""
    first, second = (_HALVES.sub("", tag.lower()) for tag in (opening, closing))
    return opening != closing and first == second != ""


def mirrored(opening: str) -> str | None:
    """Return the closing tag according to the usual conventions, or None if the tag does not follow any convention."""
    for before, after in (("START", "END"), ("start", "end"), ("BEGIN", "END"), ("begin", "end")):
        if before in opening:
            return opening.replace(before, after)
    if re.fullmatch(r"[<\[][^/|].*[>\]]", opening):
        return f"{opening[0]}/{opening[1:]}"
    return None


def merged(first: str, second: str) -> str | None:
    """Return one literal for both texts, with a slot for each number that differs, or None if other text differs."""
    if first == second:
        return first
    parts, others = (re.split(r"(\d+)", text) for text in (first, second))
    if len(parts) != len(others) or parts[::2] != others[::2]:
        return None
    pairs = zip(parts, others, strict=True)
    return "".join(one if one == other else INDEX for one, other in pairs)


def pattern_of(literal: str) -> str:
    """Return a regular expression for the literal. Whitespace in the literal matches any amount of whitespace."""
    written = []
    for part in re.split(r"(\s+)", literal):
        if part.isspace():
            written.append(r"\s*")
        else:
            written += [_CLASSES.get(char) or re.escape(char) for char in part]
    return "".join(written)


def any_of(pieces: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any number of these pieces in a row, with whitespace between the pieces."""
    patterns = sorted({pattern_of(piece) for piece in pieces if piece.strip()}, key=len, reverse=True)
    return re.compile(r"\s*(?:(?:" + "|".join(patterns) + r")\s*)*" if patterns else r"\s*")


def occurrences(text: str, word: str, start: int = 0) -> Iterator[int]:
    while (start := text.find(word, start)) >= 0:
        yield start
        start += 1

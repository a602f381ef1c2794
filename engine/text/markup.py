"""Which characters of a prompt are its template's own markup, and what tokens they become. Pure.

A prompt comes with `marked`: the same text, in which FROM_CALLER stands for each character of a caller that could be
part of a control token. So what reads like a control token in a caller's text is not found in `marked`, and stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

FROM_CALLER = "\U0010ffff"
_SPACE = " \t\n\v\f\r"  # C's isspace


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that llama.cpp finds in a text before it tokenizes the rest (llama_vocab: cache_special_tokens)."""

    id: int
    text: str
    is_control: bool  # else user-defined: found whether special tokens are wanted or not
    strips_left: bool = False  # space before it goes
    strips_right: bool = False


def from_caller(text: str) -> str:
    """A text of a caller, as it may stand in `marked`: its space shows, as some tokens take the space beside them."""
    return re.sub(r"\S", FROM_CALLER, text)


def tokenize_marked(
    text: str,
    marked: str,
    specials: Sequence[SpecialToken],
    markup: frozenset[str],
    tokenize: Callable[[str, bool], list[int]],
) -> list[int]:
    """The tokens of a prompt, in which the caller's text becomes no control token, and none of those in `markup`.

    `specials` are all of the vocabulary, the longest first. `tokenize(text, parse_special)` is the vocabulary's own,
    and adds nothing. What has nothing of that kind in it becomes the same tokens as ever.
    """
    guarded = [special.text for special in specials if special.is_control or special.text in markup]
    if marked == text or all(text.count(literal) == marked.count(literal) for literal in guarded):
        return tokenize(text, True)
    tokens: list[int] = []
    for part in _parts(marked, specials):
        if isinstance(part, SpecialToken):
            tokens.append(part.id)
        else:
            for piece in _cut(text[part[0] : part[1]], markup):
                tokens += tokenize(piece, False)
    return tokens


def _parts(marked: str, specials: Iterable[SpecialToken]) -> list[SpecialToken | tuple[int, int]]:
    """Special tokens, and the ranges of text between them: as llama.cpp does it (tokenizer_st_partition)."""
    parts: list[SpecialToken | tuple[int, int]] = [(0, len(marked))]
    for special in specials:
        if special.text and special.text in marked:
            parts = [found for part in parts for found in _split(marked, part, special)]
    return parts


def _split(
    marked: str, part: SpecialToken | tuple[int, int], special: SpecialToken
) -> Iterator[SpecialToken | tuple[int, int]]:
    if isinstance(part, SpecialToken):
        yield part
        return
    start, end = part
    while (at := marked.find(special.text, start, end)) >= 0:
        before = at
        while special.strips_left and before > start and marked[before - 1] in _SPACE:
            before -= 1
        if before > start:
            yield start, before
        yield special
        start = at + len(special.text)
        while special.strips_right and start < end and marked[start] in _SPACE:
            start += 1
    if start < end:
        yield start, end


def _cut(text: str, markup: Iterable[str]) -> list[str]:
    """The text in pieces, so that no piece holds one of these whole: llama.cpp finds user-defined tokens regardless."""
    pieces = [text]
    for literal in markup:
        pieces = [piece for whole in pieces for piece in _apart(whole, literal)]
    return pieces


def _apart(text: str, literal: str) -> Iterator[str]:
    while len(literal) > 1 and (at := text.find(literal)) >= 0:
        yield text[: at + 1]
        text = text[at + 1 :]
    if text:
        yield text

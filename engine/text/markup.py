"""Tokenize a prompt so that only the template's own markup becomes control tokens.

A prompt has a second version, `marked`, in which FROM_CALLER replaces each of the caller's characters that could be
part of a control token. A control token that is found in `marked` therefore comes from the template. Control tokens in
the caller's text are not found in `marked`, so they remain text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

FROM_CALLER = "\U0010ffff"
SPACE = " \t\n\v\f\r"  # the C library's isspace
_SPACES = f"[{SPACE}]*"


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that llama.cpp splits off before it tokenizes the rest of a text (llama_vocab: cache_special_tokens)."""

    id: int
    text: str
    is_control: bool  # False: user-defined, which llama.cpp finds even without `parse_special`
    strips_left: bool = False  # drops the whitespace before it
    strips_right: bool = False


def from_caller(text: str) -> str:
    """Return the marked version of a caller's text.

    Whitespace is kept, because some tokens drop the whitespace around them.
    """
    return re.sub(r"\S", FROM_CALLER, text)


def tokenize_marked(
    text: str,
    marked: str,
    specials: Sequence[SpecialToken],
    markup: frozenset[str],
    tokenize: Callable[[str, bool], list[int]],
) -> list[int]:
    """Return the tokens of a prompt. The caller's text never becomes a control token or a token from `markup`.

    `specials` are all special tokens of the vocabulary, longest first. `tokenize(text, parse_special)` tokenizes a text
    without adding tokens around it. If the caller's text contains no control tokens, the prompt is tokenized as a
    whole.
    """
    guarded = [special.text for special in specials if special.is_control or special.text in markup]
    if marked == text or all(text.count(literal) == marked.count(literal) for literal in guarded):
        return tokenize(text, True)
    # Like llama.cpp (tokenizer_st_partition): special tokens first, and the longest before those that it contains.
    found = {special.text: special for special in specials if special.text and special.text in marked}
    pattern = "|".join(f"({re.escape(text)}){_SPACES * special.strips_right}" for text, special in found.items())
    tokens, at = [], 0
    for match in re.finditer(pattern or "(?!)", marked):
        special, before = found[match[match.lastindex or 0]], text[at : match.start()]
        tokens += _tokens_of_text(before.rstrip(SPACE) if special.strips_left else before, markup, tokenize)
        tokens.append(special.id)
        at = match.end()
    return tokens + _tokens_of_text(text[at:], markup, tokenize)


def _tokens_of_text(text: str, markup: frozenset[str], tokenize: Callable[[str, bool], list[int]]) -> list[int]:
    """Tokenize a text in pieces without any text from `markup`, which llama.cpp always converts to special tokens."""
    cuts = sorted({match.start() + 1 for literal in markup if len(literal) > 1 for match in _found(literal, text)})
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    return [token for piece in pieces if piece for token in tokenize(piece, False)]


def _found(literal: str, text: str) -> Iterator[re.Match[str]]:
    """Find all occurrences of a literal, including overlapping ones."""
    return re.finditer(f"(?={re.escape(literal)})", text)

"""Which characters of a prompt are its template's own markup, and what tokens they become. Pure.

A prompt comes with `marked`: the same text, in which FROM_CALLER stands for each character of a caller that could be
part of a control token. So a caller's text that reads like a control token is not found in `marked`, and stays text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

FROM_CALLER = "\U0010ffff"
SPACE = " \t\n\v\f\r"  # C's isspace
_SPACES = f"[{SPACE}]*"


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that llama.cpp finds in a text before it tokenizes the rest (llama_vocab: cache_special_tokens)."""

    id: int
    text: str
    is_control: bool  # else user-defined: found whether special tokens are wanted or not
    strips_left: bool = False  # space before it goes
    strips_right: bool = False


def from_caller(text: str) -> str:
    """Return a caller's text for `marked`. Its space stays, because some tokens take the space around them."""
    return re.sub(r"\S", FROM_CALLER, text)


def tokenize_marked(
    text: str,
    marked: str,
    specials: Sequence[SpecialToken],
    markup: frozenset[str],
    tokenize: Callable[[str, bool], list[int]],
) -> list[int]:
    """Return the tokens of a prompt. The caller's text becomes no control token, and none of those in `markup`.

    `specials` are all of the vocabulary, the longest first. `tokenize(text, parse_special)` is the vocabulary's own,
    and adds nothing. A prompt without such text is tokenized as a whole.
    """
    guarded = [special.text for special in specials if special.is_control or special.text in markup]
    if marked == text or all(text.count(literal) == marked.count(literal) for literal in guarded):
        return tokenize(text, True)
    # As llama.cpp does it (tokenizer_st_partition): special tokens first, the longest before those that it contains.
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
    """Tokenize a text in pieces, so that no piece holds one of `markup` whole: llama.cpp would find it regardless."""
    cuts = sorted({match.start() + 1 for literal in markup if len(literal) > 1 for match in _found(literal, text)})
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    return [token for piece in pieces if piece for token in tokenize(piece, False)]


def _found(literal: str, text: str) -> Iterator[re.Match[str]]:
    """Find all places, also where a literal overlaps itself."""
    return re.finditer(f"(?={re.escape(literal)})", text)

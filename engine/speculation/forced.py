"""Drafts from a grammar: text that it leaves no choice about.

Which bytes come is certain, which tokens they are is not: the model may spell a word in several ways, and the last
token may go on with what is free again. So these are drafts like any others.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import accumulate

from cellama.engine.backend import Vocabulary
from cellama.engine.scheduling.sequence import Sequence

from .sources import Draft

MOST_BYTES = 96  # that are looked at
KEPT_TEXTS = 512  # whose tokens are remembered
SURE, GUESSED, LAST = 7, 4, 0  # marks: guessed ones have guessed blanks before them, the last may go on


class Spelling:
    """Texts as the tokens that a vocabulary makes of them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: OrderedDict[bytes, list[int]] = OrderedDict()

    def tokens_of(self, text: bytes) -> list[int]:
        """The tokens of a text in the middle of another one; none if it can't be told."""
        tokens = self._known.get(text)
        if tokens is None:
            tokens = self._known[text] = self._tokenize(text)
            if len(self._known) > KEPT_TEXTS:
                self._known.popitem(last=False)
        return tokens

    def _tokenize(self, text: bytes) -> list[int]:
        """Some vocabularies put a space before a text: then it is looked for behind a line's end."""
        readable = text.decode(errors="ignore")  # it may end within a character
        wanted = readable.encode()
        if not text.startswith(wanted):
            return []
        for head in ("", "\n"):
            tokens = self._vocabulary.tokenize(head + readable, add_special=False)
            pieces = [self._vocabulary.token_bytes(token) for token in tokens]
            for first in range(min(3, len(tokens))):
                if b"".join(pieces[first:]) == wanted:
                    return tokens[first:]
        return []


class ForcedText:
    """A Source: what the grammar of a sequence leaves no choice about, but for blanks."""

    def __init__(self, sequence: Sequence, vocabulary: Vocabulary, spelling: Spelling) -> None:
        self._sequence = sequence
        self._vocabulary = vocabulary
        self._spelling = spelling

    def draft(self, most: int) -> Draft | None:
        sequence = self._sequence
        if sequence.sampler is None:
            return None
        before = self._vocabulary.token_bytes(sequence.tokens[-1])[-1:] if sequence.num_output else b""
        text, num_certain = sequence.sampler.likely_text(before[0] if before else 0, MOST_BYTES)
        tokens = self._spelling.tokens_of(text)[:most] if text else []
        if not tokens:
            return None
        ends = accumulate(len(self._vocabulary.token_bytes(token)) for token in tokens)
        marks = [SURE if end <= num_certain else GUESSED for end in ends]
        return Draft("grammar", tokens, [*marks[:-1], LAST])

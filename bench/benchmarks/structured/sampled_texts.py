"""Draw random texts that a constraint allows, without a model.

Tests of constraints require texts that a good model would not write, and these texts must end. The weights are
therefore random, and increasingly favour the end of a text as the text grows.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np

from cellama.engine.bundled import TINY_PATH
from cellama.engine.grammar.grammars import Constraint, Grammars, GrammarSpec
from cellama.engine.llama import LlamaModel

MAX_TOKENS = 200  # tokens after which a text counts as unfinished
_CLOSING = b'"]}'  # bytes that bring JSON nearer to its end
_ODD = b'"\\{}[],:.-+eE0'  # bytes at which the rules of JSON and of numbers change


class DeadEnd(Exception):
    """The text can neither continue nor end at this point."""


class SampledTexts:
    """Draws texts from a model's vocabulary, by default the vocabulary of the bundled model."""

    def __init__(self, path: Path = TINY_PATH) -> None:
        self._weights = LlamaModel(path)
        self.grammars: Grammars = self._weights.grammars
        size = self._weights.info.n_vocab
        self._all = np.arange(size)
        self._pieces = [self._weights.token_bytes(token) for token in range(size)]
        self._is_end = np.array([self._weights.is_end(token) for token in range(size)])
        self._closing = np.array([piece[:1] in tuple(_CLOSING[i : i + 1] for i in range(3)) for piece in self._pieces])
        odd = [bool(set(piece) & set(_ODD)) for piece in self._pieces]
        single = [len(piece) == 1 for piece in self._pieces]
        self._liking = 1.0 + 6.0 * np.array(odd) + 2.0 * np.array(single)  # words are likelier than bytes

    def texts(self, form: GrammarSpec, count: int, seed: int = 0, max_tokens: int = MAX_TOKENS) -> list[str | None]:
        """Return `count` texts that this constraint allows.

        A text is None if it has not finished after `max_tokens`. Raises InvalidRequest, GrammarFailed or DeadEnd.
        """
        compiled = self.grammars.compile(form)
        return [self._text(compiled.start(), Random(seed * 1000 + at), max_tokens) for at in range(count)]

    def accepts(self, form: GrammarSpec, text: str) -> bool:
        """Return whether the constraint allows each token of the text, and then the end of the text."""
        constraint = self.grammars.compile(form).start()
        for token in self._weights.tokenize(text, add_special=False):
            if not constraint.allows(np.array([token]))[0]:
                return False
            constraint.accept(token)
        return bool(constraint.allows(self._all)[self._is_end].any())

    def close(self) -> None:
        self._weights.close()

    def _text(self, constraint: Constraint, random: Random, max_tokens: int) -> str | None:
        weights = np.random.default_rng(random.getrandbits(32))
        written = bytearray()
        for place in range(max_tokens):
            allowed = constraint.allows(self._all)
            hurry = place / max_tokens
            if allowed[self._is_end].any() and random.random() < 0.15 + hurry:
                return written.decode()
            choice = allowed & ~self._is_end
            if not choice.any():
                if allowed.any():
                    return written.decode()
                raise DeadEnd(written.decode(errors="replace"))
            closing = choice & self._closing
            if closing.any() and random.random() < hurry:
                choice = closing
            likes = np.flatnonzero(choice)
            scores = np.log(self._liking[likes]) + weights.gumbel(size=len(likes))
            token = int(likes[scores.argmax()])
            constraint.accept(token)
            written += self._pieces[token]
        return None

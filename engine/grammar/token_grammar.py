"""Check which tokens a grammar allows by passing each token's bytes through the automaton."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from cellama.engine.errors import GrammarFailed

from .automaton import Automaton, WorkBudget

Ids = NDArray[np.int64]
Allowed = NDArray[np.bool_]
_MAX_MASKS = 64  # masks cached per automaton
_MAX_SINGLE_TOKENS = 8  # number of tokens up to which checking them one by one is faster


class TokenBytes:
    """The bytes of all tokens of a vocabulary, concatenated."""

    def __init__(self, pieces: Iterable[bytes], ends: frozenset[int]) -> None:
        """Concatenate the bytes of all tokens. `ends` are the tokens that end generation.

        Tokens that start with a NUL byte have no text.
        """
        texts = [b"" if piece[:1] == b"\0" else piece for piece in pieces]
        self.of = texts
        self.ends = ends
        self.end_ids = np.array(sorted(ends), np.int64)
        self.lengths = np.array([len(text) for text in texts], np.int32)
        self.offsets = np.concatenate([[0], self.lengths.cumsum()])
        self.flat = np.frombuffer(b"".join(texts), np.uint8)


class TokenGrammar:
    """A Constraint (grammars.py) that applies a GBNF grammar to one sequence.

    Only the engine thread may use this class.
    """

    def __init__(
        self, automaton: Automaton, tokens: TokenBytes, work: WorkBudget, visible: Mapping[int, bytes] | None = None
    ) -> None:
        """Start at the grammar's root rule. Raises GrammarFailed if the grammar is too ambiguous.

        `visible` maps control tokens to their texts, which are part of the output.
        """
        self._automaton = automaton
        self._tokens = tokens
        self._work = work
        self._visible = dict(visible or {})
        self._stacks = automaton.states[automaton.start(work)]
        self._number, self._generation = automaton.start(work), automaton.generation

    def allows(self, tokens: Ids) -> Allowed:
        """Return whether each of these tokens may come next. Raises GrammarFailed if this check takes too much work."""
        state = self._state()
        if len(tokens) <= _MAX_SINGLE_TOKENS:
            return np.array([self._allows_one(state, token) for token in tokens.tolist()], np.bool_)
        if 4 * len(tokens) > len(self._tokens.lengths):
            allowed: Allowed = self._mask(state)[tokens]
        else:
            allowed = self._check_all(state, tokens)
        allowed[np.isin(tokens, self._tokens.end_ids)] = self._automaton.accepting[state]
        for token in self._visible:
            allowed[tokens == token] = self._allows_one(state, token)
        return allowed

    def mask(self) -> None:
        """Return None, because checking the whole vocabulary takes much longer than checking a few tokens."""

    def accept(self, token: int) -> None:
        """Advance past an allowed token. Raises GrammarFailed if the token is not allowed."""
        self._work.earn()
        if token in self._tokens.ends:
            return
        following = self._automaton.walk(self._state(), self._text_of(token), self._work)
        if following < 0:
            raise GrammarFailed(
                f"token {token} does not follow the grammar; the text to continue was generated without this grammar"
            )
        self._number, self._stacks = following, self._automaton.states[following]

    def forced_tokens(self) -> list[int]:
        """Return an empty list, because the automaton does not look for forced text."""
        return []

    def _state(self) -> int:
        automaton = self._automaton
        if automaton.is_full:
            automaton.clear()
        if self._generation is not automaton.generation:
            self._number, self._generation = automaton.number_of(self._stacks), automaton.generation
        return self._number

    def _text_of(self, token: int) -> bytes:
        return self._visible.get(token) or self._tokens.of[token]

    def _allows_one(self, state: int, token: int) -> bool:
        if token in self._tokens.ends:
            return self._automaton.accepting[state]
        text = self._text_of(token)
        return bool(text) and self._automaton.walk(state, text, self._work) >= 0

    def _mask(self, state: int) -> Allowed:
        """Return whether each token of the vocabulary may come next."""
        masks, size = self._automaton.masks, len(self._tokens.lengths)
        if state in masks:
            masks.move_to_end(state)
        else:
            masks[state] = np.packbits(self._check_all(state, np.arange(size)))
            if len(masks) > _MAX_MASKS:
                masks.popitem(last=False)
        return np.unpackbits(masks[state], count=size).astype(np.bool_)

    def _check_all(self, state: int, tokens: Ids) -> Allowed:
        """Pass the bytes of many tokens through the automaton in parallel, one byte of each token at a time.

        Tokens without text are not allowed.
        """
        lengths, offsets = self._tokens.lengths[tokens], self._tokens.offsets[tokens]
        allowed = np.zeros(len(tokens), np.bool_)
        active = np.flatnonzero(lengths)
        states = np.full(len(active), state, np.int32)
        classes = np.array(self._automaton.byte_class, np.uint8)
        depth = 0
        while len(active):
            read = classes[self._tokens.flat[offsets[active] + depth]]
            states = self._automaton.step_all(states, read, self._work)
            depth += 1
            alive = states >= 0
            active, states = active[alive], states[alive]
            ended = lengths[active] == depth
            allowed[active[ended]] = True
            active, states = active[~ended], states[~ended]
        return allowed

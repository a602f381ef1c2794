"""Which tokens may come next by a grammar: the automaton over bytes, asked for the bytes of tokens."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from cellama.engine.errors import GrammarFailed

from .automaton import Automaton, WorkBudget
from .program import compile_grammar

Ids = NDArray[np.int64]
Allowed = NDArray[np.bool_]
_MAX_MASKS = 64  # of an automaton
_FEW = 8  # tokens that are looked at one by one
_MAX_AUTOMATA = 16  # kept of a vocabulary, and ...
_MAX_KEPT_BYTES = 32 << 20  # ... what all of those take; the one used last stays


class TokenBytes:
    """The bytes of a vocabulary's tokens, side by side."""

    def __init__(self, pieces: Iterable[bytes], ends: frozenset[int]) -> None:
        """`ends` are the tokens that end a generation. One that begins with a NUL, or is empty, has no text."""
        texts = [b"" if piece[:1] == b"\0" else piece for piece in pieces]
        self.of = texts
        self.ends = ends
        self.end_ids = np.array(sorted(ends), np.int64)
        self.lengths = np.array([len(text) for text in texts], np.int32)
        self.offsets = np.concatenate([[0], self.lengths.cumsum()])
        self.flat = np.frombuffer(b"".join(texts), np.uint8)


class TokenGrammar:
    """The grammar of one sequence. The Constraint of `sampler.py`. Engine thread only."""

    def __init__(
        self, automaton: Automaton, tokens: TokenBytes, work: WorkBudget, visible: Mapping[int, bytes] | None = None
    ) -> None:
        """`visible` are control tokens whose text belongs to the output all the same. Raises GrammarFailed."""
        self._automaton = automaton
        self._tokens = tokens
        self._work = work
        self._visible = dict(visible or {})
        self._ways = automaton.states[automaton.start(work)]
        self._number, self._generation = automaton.start(work), automaton.generation

    def allows(self, tokens: Ids) -> Allowed:
        """Which of these tokens may come next. Raises GrammarFailed when that takes too much work."""
        state = self._state()
        if len(tokens) <= _FEW:
            return np.array([self._allows_one(state, token) for token in tokens.tolist()], np.bool_)
        if 4 * len(tokens) > len(self._tokens.lengths):
            allowed: Allowed = self._mask(state)[tokens]
        else:
            allowed = self._look(state, tokens)
        allowed[np.isin(tokens, self._tokens.end_ids)] = self._automaton.accepting[state]
        for token in self._visible:
            allowed[tokens == token] = self._allows_one(state, token)
        return allowed

    def mask(self) -> None:
        """None: walking the whole vocabulary takes far longer than a few tokens."""

    def accept(self, token: int) -> None:
        """An allowed token comes next. Raises GrammarFailed."""
        self._work.earn()
        if token in self._tokens.ends:
            return
        following = self._automaton.walk(self._state(), self._text_of(token), self._work)
        if following < 0:
            raise GrammarFailed(f"token {token} does not follow the grammar; what it goes on with was made otherwise")
        self._number, self._ways = following, self._automaton.states[following]

    def forced_tokens(self) -> list[int]:
        """Not looked for."""
        return []

    def _state(self) -> int:
        automaton = self._automaton
        if automaton.is_full:
            automaton.forget()
        if self._generation is not automaton.generation:
            self._number, self._generation = automaton.number_of(self._ways), automaton.generation
        return self._number

    def _text_of(self, token: int) -> bytes:
        return self._visible.get(token) or self._tokens.of[token]

    def _allows_one(self, state: int, token: int) -> bool:
        if token in self._tokens.ends:
            return self._automaton.accepting[state]
        text = self._text_of(token)
        return bool(text) and self._automaton.walk(state, text, self._work) >= 0

    def _mask(self, state: int) -> Allowed:
        """Which of all tokens may come next."""
        masks, size = self._automaton.masks, len(self._tokens.lengths)
        if state in masks:
            masks.move_to_end(state)
        else:
            masks[state] = np.packbits(self._look(state, np.arange(size)))
            if len(masks) > _MAX_MASKS:
                masks.popitem(last=False)
        return np.unpackbits(masks[state], count=size).astype(np.bool_)

    def _look(self, state: int, tokens: Ids) -> Allowed:
        """Walks the texts of many tokens byte by byte, all together; tokens without a text are not allowed."""
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


class Automata:
    """Those of one vocabulary that were used lately. Any thread; an automaton is the engine thread's."""

    def __init__(self, tokens: TokenBytes) -> None:
        self.tokens = tokens
        self._automata: OrderedDict[tuple[str, str], Automaton] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str, root: str) -> Automaton:
        """Raises InvalidRequest for what is no grammar."""
        key = (text, root)
        with self._lock:
            found = self._automata.get(key)
        automaton = found or Automaton(compile_grammar(text, root))
        with self._lock:
            automaton = self._automata.setdefault(key, automaton)
            self._automata.move_to_end(key)
            self._drop_oldest()
        return automaton

    def _drop_oldest(self) -> None:
        """An automaton grows while it is used: what it took lately is known when the next one is asked for."""
        while len(self._automata) > 1 and (len(self._automata) > _MAX_AUTOMATA or self.num_bytes > _MAX_KEPT_BYTES):
            self._automata.popitem(last=False)

    @property
    def num_bytes(self) -> int:
        """What is kept takes about so much, beside its masks."""
        return sum(automaton.num_bytes for automaton in self._automata.values())

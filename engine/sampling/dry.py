"""Apply the DRY penalty, which makes tokens that would continue a repetition less likely.

For each earlier position, the sampler stores how many tokens ending at this position match the end of the text. After
each token, numpy updates these numbers for a whole context in a few microseconds. Source: llama.cpp, llama-sampler.cpp,
by pi6am.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellama.engine.request import SamplingParams

_MAX_TAIL = 20  # maximum number of tokens of a breaker after its first one
_FLOAT_MAX_LOG = 88.7228391


@dataclass(frozen=True)
class Breakers:
    """DRY sequence breakers. `tails` maps each breaker's first token to the tokens that must follow it, if any."""

    tails: dict[int, tuple[tuple[int, ...], ...]]

    def longest(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest breaker at the start of `tokens`, minus 1, or -1 if no breaker matches."""
        fitting = [len(tail) for tail in self.tails.get(tokens[0], ()) if tuple(tokens[1 : 1 + len(tail)]) == tail]
        return max(fitting, default=-1)

    @functools.cached_property
    def single(self) -> frozenset[int]:
        """The breakers that consist of a single token."""
        return frozenset(token for token, tails in self.tails.items() if () in tails)


def find_breaker(text: bytes, pieces: Sequence[bytes], tokenize: Callable[[str], list[int]]) -> Breakers:
    """Find the tokens in the vocabulary that contain the breaker or end with the start of the breaker."""
    tails: dict[int, tuple[tuple[int, ...], ...]] = {}
    heads = [text[:count] for count in range(1, len(text))]
    last_bytes = {head[-1] for head in heads}
    for token, piece in enumerate(pieces):
        if text in piece:
            tails[token] = ((),)
        elif piece and piece[-1] in last_bytes:
            rests = [text[len(head) :] for head in heads if piece.endswith(head)]
            found = dict.fromkeys(tail for rest in rests if (tail := _tail(rest, tokenize)))
            if found:
                tails[token] = tuple(found)
    return Breakers(tails)


def _tail(rest: bytes, tokenize: Callable[[str], list[int]]) -> tuple[int, ...]:
    try:
        return tuple(tokenize(rest.decode())[:_MAX_TAIL])
    except UnicodeDecodeError:  # it would start inside a character
        return ()


def joined(breakers: Iterable[Breakers]) -> Breakers:
    """Return the union of the breakers."""
    tails: dict[int, tuple[tuple[int, ...], ...]] = {}
    for each in breakers:
        for token, more in each.tails.items():
            tails[token] = tuple(dict.fromkeys((*tails.get(token, ()), *more)))
    return Breakers(tails)


class Dry:
    """The DRY penalty of one sequence. Only the engine thread may use it."""

    def __init__(self, params: SamplingParams, window: int, breakers: Breakers, history: Sequence[int]) -> None:
        """Create the penalty. `window` is the number of recent tokens to consider."""
        self._params = params
        self._window = window
        self._breakers = breakers
        self._size = len(history)
        self._tokens = np.zeros(2 * len(history) + 64, np.int64)
        self._tokens[: self._size] = history
        self._repeats = np.zeros(len(self._tokens), np.int32)  # tokens up to each index that equal the end of the text
        self._repeats[: self._size] = _repeats(history)
        self._break = -1  # index of the last breaker that is older than any tail
        self._break_length = 0
        for index in range(max(0, self._size - window), self._size - _MAX_TAIL):
            self._note_break(index)
        self._max_exponent = int(_FLOAT_MAX_LOG / math.log(params.dry_base)) if params.dry_base > 1.000001 else 0

    def accept(self, token: int) -> None:
        if self._size == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._repeats = np.concatenate([self._repeats, np.zeros_like(self._repeats)])
        start, size = max(0, self._size + 1 - self._window), self._size
        before = self._repeats[max(start - 1, 0) : size - 1] if size else self._repeats[:0]
        following = np.where(self._tokens[start:size] == token, 1, 0).astype(np.int32)
        shifted = before if start else np.concatenate([np.zeros(1, np.int32), before])[: len(following)]
        self._repeats[start:size] = following * (shifted + 1)
        self._tokens[size] = token
        self._repeats[size] = 0
        self._size += 1
        if self._size > _MAX_TAIL:
            self._note_break(self._size - _MAX_TAIL - 1)

    def apply(self, logits: NDArray[np.float32]) -> None:
        start, allowed = max(0, self._size - self._window), self._params.dry_allowed_length
        if self._size - start <= allowed:
            return
        limit = self._limit(start)
        if limit < allowed:
            return
        distances = np.arange(1, self._size - start, dtype=np.int32)  # no repetition starts before the window
        lengths = np.minimum(np.minimum(self._repeats[start : self._size - 1], distances), limit)
        indices = np.flatnonzero(lengths >= allowed)
        tokens, which = np.unique(self._tokens[start + 1 + indices], return_inverse=True)
        longest = np.zeros(len(tokens), np.int64)
        np.maximum.at(longest, which, lengths[indices])
        penalised = np.array([token not in self._breakers.single for token in tokens.tolist()], np.bool_)
        exponents = (longest - allowed)[penalised]
        if self._max_exponent:
            exponents = np.minimum(exponents, self._max_exponent)
        with np.errstate(over="ignore"):
            penalties = self._params.dry_multiplier * np.float64(self._params.dry_base) ** exponents
            logits[tokens[penalised]] -= penalties.astype(np.float32)

    def _limit(self, start: int) -> int:
        """Return the maximum length of a repetition that does not cross the last breaker."""
        recent = self._tokens[max(start, self._size - _MAX_TAIL) : self._size].tolist()
        for back in range(len(recent)):
            longest = self._breakers.longest(recent[len(recent) - 1 - back :])
            if longest >= 0:
                return back - longest
        if self._break >= start:
            return self._size - 1 - self._break - self._break_length
        return self._size - start

    def _note_break(self, index: int) -> None:
        token = int(self._tokens[index])
        if token in self._breakers.tails:
            following = self._tokens[index : min(index + _MAX_TAIL + 1, self._size)].tolist()
            longest = self._breakers.longest(following)
            if longest >= 0:
                self._break, self._break_length = index, longest


def _repeats(tokens: Sequence[int]) -> NDArray[np.int32]:
    """Return, for each index, how many tokens ending at this index match the last tokens (Z algorithm).

    The last number is 0.
    """
    size = len(tokens)
    found = np.zeros(size, np.int32)
    backwards = list(reversed(tokens))
    lengths = [0] * size
    left = right = 0
    for index in range(1, size):
        length = min(right - index, lengths[index - left]) if index < right else 0
        while index + length < size and backwards[length] == backwards[index + length]:
            length += 1
        if index + length > right:
            left, right = index, index + length
        lengths[index] = length
    found[:] = lengths[::-1]
    return found

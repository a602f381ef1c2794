"""Logits processors, which change the logits of one sequence before its next token is chosen.

The built-in processors are defined here and in `dry.py`. The model option `logits_processors` adds other processors by
import path (docs/how-to/library.md).
"""

from __future__ import annotations

import functools
import pkgutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellama.engine.errors import InvalidRequest
from cellama.engine.request import SamplingParams

from .dry import Breakers, Dry

Logits = NDArray[np.float32]  # one per token of the vocabulary


class LogitsProcessor(Protocol):
    """Changes the logits of one sequence based on the earlier tokens. Only the engine thread may use it."""

    def apply(self, logits: Logits) -> None:
        """Modify the logits of the next token in place.

        The array contains one float32 for each token of the vocabulary. -inf forbids a token.
        """
        ...

    def accept(self, token: int) -> None:
        """Record the chosen token."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence's state when its processors are created.

    The processors are created when the sequence starts or resumes.
    """

    params: SamplingParams
    tokens: Sequence[int]  # the prompt, and the output if the sequence resumes
    num_sampled: int  # number of these tokens, at the end, that are output
    n_vocab: int
    end_tokens: frozenset[int]  # tokens that end a text


ProcessorFactory = Callable[[SequenceStart], LogitsProcessor | None]  # None if the sequence needs no processor


class LogitBias:
    """Adds a constant to the logits of some tokens, with a separate constant for each token."""

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        ids, values = zip(*biases, strict=True)
        self._ids = np.array(ids, np.int64)
        self._values = np.array(values, np.float32)

    def apply(self, logits: Logits) -> None:
        np.add.at(logits, self._ids, self._values)  # a token may occur twice

    def accept(self, token: int) -> None: ...


class Penalties:
    """Makes recent tokens less likely. Source: the penalties in llama.cpp's llama-sampler.cpp."""

    def __init__(self, params: SamplingParams, tokens: Iterable[int]) -> None:
        self._params = params
        self._window: deque[int] = deque(tokens, maxlen=params.repeat_last_n)
        self._counts = Counter(self._window)

    def apply(self, logits: Logits) -> None:
        ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        values, repeat = logits[ids], self._params.repeat_penalty
        values = np.where(values <= 0, values * repeat, values / repeat)
        logits[ids] = values - counts * self._params.frequency_penalty - self._params.presence_penalty

    def accept(self, token: int) -> None:
        if len(self._window) == self._window.maxlen:
            oldest = self._window[0]
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._window.append(token)
        self._counts[token] += 1


class BannedTokens:
    """Forbids some tokens at every position. Sequences can share this processor because it has no state."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = frozenset(tokens)
        self._ids = np.array(sorted(self.tokens), np.int64)

    def apply(self, logits: Logits) -> None:
        logits[self._ids] = -np.inf

    def accept(self, token: int) -> None: ...


class MinTokens:
    """Forbids end tokens until the text has reached the minimum number of tokens."""

    def __init__(self, start: SequenceStart) -> None:
        self._ids = np.array(sorted({*start.end_tokens, *start.params.stop_token_ids}), np.int64)
        self._num_missing = start.params.min_tokens - start.num_sampled

    def apply(self, logits: Logits) -> None:
        if self._num_missing > 0:
            logits[self._ids] = -np.inf

    def accept(self, token: int) -> None:
        self._num_missing -= 1


def make_processors(
    start: SequenceStart,
    *,
    breakers: Breakers | None = None,
    dry_window: int = 0,
    added: Iterable[ProcessorFactory] = (),
    banned: BannedTokens | None = None,
) -> list[LogitsProcessor]:
    """Return the processors of a sequence in the order in which they apply.

    The built-in biases, penalties and DRY are applied in llama.cpp's order (common/sampling.cpp), followed by the
    processors in `added`. Bans are applied last, so no other processor can lift a ban. DRY uses `breakers`, which are
    strings that a repetition must not cross, and `dry_window`, which is the number of recent tokens to consider.
    """
    params, made = start.params, list[LogitsProcessor]()
    if params.logit_bias:
        made.append(LogitBias(params.logit_bias))
    if params.has_penalties:
        made.append(Penalties(params, start.tokens))
    if breakers is not None:
        made.append(Dry(params, dry_window, breakers, start.tokens))
    made += [processor for factory in added if (processor := factory(start)) is not None]
    if params.min_tokens > start.num_sampled:
        made.append(MinTokens(start))
    if banned is not None:
        made.append(banned)
    return made


@functools.cache
def load_processor(path: str) -> ProcessorFactory:
    """Import the class or function at the path `package.module:name`.

    Raises InvalidRequest if the object can't be imported or is not callable.
    """
    try:
        factory = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(f"logits_processors: {path!r} can't be imported: {error}; check the path") from None
    if not callable(factory):
        raise InvalidRequest(f"logits_processors: {path!r} is not callable; use the path of a class or a function")
    made: ProcessorFactory = factory
    return made

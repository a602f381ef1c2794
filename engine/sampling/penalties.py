"""The penalties on tokens that occurred lately."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from cellama.engine.sampling_params import SamplingParams

from .filters import (
    Logits,
)


class Penalties:
    """Makes tokens that occurred lately less likely. Source: llama.cpp, llama-sampler.cpp, penalties."""

    def __init__(self, params: SamplingParams, history: Iterable[int]) -> None:
        self._params = params
        self._window: deque[int] = deque(history, maxlen=params.repeat_last_n)
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

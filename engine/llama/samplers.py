"""How one sequence chooses its next token from llama.cpp's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from ..params import SamplingParams

if TYPE_CHECKING:
    from .context import LlamaBackend

Banned = NDArray[np.int64] | None


class GreedySampler:
    """The most likely token, straight from the logits: no chain, no copy of the vocabulary."""

    def __init__(self, backend: LlamaBackend, banned: Banned) -> None:
        self._backend = backend
        self._banned = banned

    def sample(self, slot: int) -> int:
        logits = self._backend.logits(slot)
        if self._banned is not None:
            logits[self._banned] = -np.inf
        return int(logits.argmax())

    def close(self) -> None:
        pass


class ChainSampler:
    """A llama.cpp sampler chain: penalties, then top_k early, then the rest on few candidates."""

    def __init__(
        self, backend: LlamaBackend, params: SamplingParams, seed: int, history: Sequence[int], banned: Banned
    ) -> None:
        self._backend = backend
        self._banned = banned
        self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        if params.has_penalties:
            self._add(
                lib.llama_sampler_init_penalties(
                    backend.n_vocab,
                    params.repeat_last_n,
                    params.repeat_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                )
            )
        if params.is_greedy:
            self._add(lib.llama_sampler_init_greedy())
        else:
            self._add_distribution(params, seed)
        if params.has_penalties:
            for token in history[-params.repeat_last_n :]:
                lib.llama_sampler_accept(self._chain, token)

    def _add_distribution(self, params: SamplingParams, seed: int) -> None:
        if params.top_k:
            self._add(lib.llama_sampler_init_top_k(params.top_k))
        if params.top_p < 1:
            self._add(lib.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0:
            self._add(lib.llama_sampler_init_min_p(params.min_p, 1))
        self._add(lib.llama_sampler_init_temp(params.temperature))
        self._add(lib.llama_sampler_init_dist(seed))

    def _add(self, sampler: object) -> None:
        lib.llama_sampler_chain_add(self._chain, sampler)

    def sample(self, slot: int) -> int:
        if self._banned is not None:
            self._backend.logits(slot)[self._banned] = -np.inf
        return int(lib.llama_sampler_sample(self._chain, self._backend.context, self._backend.row_of(slot)))

    def close(self) -> None:
        lib.llama_sampler_free(self._chain)

"""The sampler of one sequence on llama.cpp's logits: a Chooser, with llama.cpp's grammar and DRY where asked for."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from ..errors import GrammarFailed
from ..logprobs import TokenLogprob
from ..params import SamplingParams
from ..sampling import Chooser, Logits, NothingAllowed
from .grammar import CANDIDATE, Grammar, apply, grammar_of

if TYPE_CHECKING:
    from .context import LlamaBackend


class GreedySampler:
    """The most likely token, straight from the logits, for requests that want nothing else."""

    def __init__(self, backend: LlamaBackend, banned: NDArray[np.int64] | None) -> None:
        self._backend = backend
        self._banned = banned

    def sample(self, slot: int, forced: int | None = None) -> tuple[int, TokenLogprob | None]:
        if forced is not None:
            return forced, None
        logits = self._backend.logits(slot)
        if self._banned is not None:
            logits[self._banned] = -np.inf
        return int(logits.argmax()), None

    def bind(self) -> None:
        pass

    def close(self) -> None:
        pass


class LlamaSampler:
    """Everything that SamplingParams can ask for."""

    def __init__(
        self,
        backend: LlamaBackend,
        params: SamplingParams,
        seed: int,
        history: Sequence[int],
        banned: NDArray[np.int64] | None,
        num_chosen: int,
        num_unbound: int | None,
    ) -> None:
        """Raises InvalidRequest for a grammar that llama.cpp can't take."""
        self._backend = backend
        grammar = grammar_of(params)
        self._grammar = Grammar(backend.vocabulary, *grammar) if grammar else None
        self._repetition = _Repetition(backend, params, history) if params.dry_multiplier else None
        self._chooser = Chooser(params, seed, history, banned=banned, num_chosen=num_chosen)
        if self._grammar is not None and num_unbound is not None:
            for token in history[len(history) - num_chosen + num_unbound :]:
                self._grammar.accept(token)
            self.bind()

    def bind(self) -> None:
        if self._grammar is not None:
            self._chooser.constrain(self._grammar)

    def sample(self, slot: int, forced: int | None = None) -> tuple[int, TokenLogprob | None]:
        logits = self._backend.logits(slot)
        if self._repetition is not None:
            self._repetition.apply(logits)
        try:
            token, logprob = self._chooser.choose(logits, forced)
        except NothingAllowed:
            raise GrammarFailed(
                "none of the model's tokens is allowed here by grammar, logit_bias and ignore_eos; loosen one of them"
            ) from None
        if self._repetition is not None:
            self._repetition.accept(token)
        return token, logprob

    def close(self) -> None:
        for part in (self._grammar, self._repetition):
            if part is not None:
                part.close()


class _Repetition:
    """DRY: makes tokens that would continue a repetition less likely. llama.h: llama_sampler_init_dry."""

    def __init__(self, backend: LlamaBackend, params: SamplingParams, history: Sequence[int]) -> None:
        breakers = [text.encode() for text in params.dry_sequence_breakers]
        last_n = backend.ctx_per_slot if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n
        self._sampler = lib.llama_sampler_init_dry(
            backend.vocabulary.vocab,
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            last_n,
            (ctypes.c_char_p * len(breakers))(*breakers),
            len(breakers),
        )
        self._candidates = np.zeros(backend.n_vocab, CANDIDATE)
        self._candidates["id"] = np.arange(backend.n_vocab)
        for token in history:
            self.accept(token)

    def apply(self, logits: Logits) -> None:
        self._candidates["logit"] = logits
        apply(self._sampler, self._candidates)
        logits[:] = self._candidates["logit"]

    def accept(self, token: int) -> None:
        lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        lib.llama_sampler_free(self._sampler)

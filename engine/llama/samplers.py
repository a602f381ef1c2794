"""The sampler of one sequence on llama.cpp's logits, and what the samplers of a request share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellama.engine.errors import GrammarFailed
from cellama.engine.grammar.grammars import CompiledGrammar, GrammarSpec
from cellama.engine.request import CONSTRAINTS, SamplingParams, TokenLogprob
from cellama.engine.sampling.dry import Breakers
from cellama.engine.sampling.processors import BannedTokens, ProcessorFactory, SequenceStart, make_processors
from cellama.engine.sampling.sampler import NothingAllowed, TokenSampler


class LogitsSource(Protocol):
    """What samplers need of the context (backend.py)."""

    ctx_per_slot: int

    def logits(self, slot: int, row: int) -> NDArray[np.float32]:
        """A row of logits that the last decode left for a slot: float32 of n_vocab. The sampler may write into it."""
        ...

    def likeliest(self, slot: int, row: int) -> int:
        """The token with the highest of them, before anything is written into the row."""
        ...


@dataclass(frozen=True, slots=True)
class LlamaSamplingPlan:
    """A request's parameters, and what was made of them once for all of its sequences, on its caller's thread."""

    params: SamplingParams
    constraint: CompiledGrammar | None = None
    breakers: Breakers | None = None  # with DRY
    added_processors: tuple[ProcessorFactory, ...] = ()  # those of the model option `logits_processors`

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the request asks for and is not enforced."""
        return () if self.constraint is None else self.constraint.warnings


def form_of(params: SamplingParams) -> GrammarSpec | None:
    """What a request says of its text; None if that is nothing."""
    given = next((name for name in CONSTRAINTS if getattr(params, name) is not None), None)
    if given is None:
        return None
    return GrammarSpec(given, getattr(params, given), params.grammar_root, params.strict_schema)


class LlamaSampler:
    """Samples the tokens of one sequence from the logits that decode calls leave for its slot."""

    def __init__(
        self,
        source: LogitsSource,
        plan: LlamaSamplingPlan,
        seed: int,
        start: SequenceStart,
        banned: BannedTokens | None,
        num_unbound: int | None,
        mirostat_mu: float | None,
    ) -> None:
        """Raises GrammarFailed."""
        self._source = source
        self._has_mirostat = bool(plan.params.mirostat)
        last_n = plan.params.dry_penalty_last_n
        processors = make_processors(
            start,
            breakers=plan.breakers,
            dry_window=source.ctx_per_slot if last_n < 0 else last_n,
            added=plan.added_processors,
            banned=banned,
        )
        self._sampler = TokenSampler(
            plan.params, seed, processors, num_sampled=start.num_sampled, mirostat_mu=mirostat_mu
        )
        # The fast path of a greedy request: the likeliest token is the choice, unless it is one of these.
        self._banned: frozenset[int] | None = None
        if plan.params.is_plainly_greedy and all(processor is banned for processor in processors):
            self._banned = frozenset() if banned is None else banned.tokens
        self._grammar = None if plan.constraint is None else plan.constraint.start()
        self._is_bound = False
        if self._grammar is not None and num_unbound is not None:
            for token in start.tokens[len(start.tokens) - start.num_sampled + num_unbound :]:
                self._grammar.accept(token)
            self.bind()

    @property
    def mirostat_mu(self) -> float | None:
        """What mirostat has learned; None without it."""
        return self._sampler.mirostat_mu if self._has_mirostat else None

    def bind(self) -> None:
        if self._grammar is not None:
            self._sampler.constrain(self._grammar)
            self._is_bound = True

    def forced_tokens(self) -> list[int]:
        return self._grammar.forced_tokens() if self._is_bound and self._grammar is not None else []

    def sample(self, slot: int, forced: int | None = None, row: int = 0) -> tuple[int, TokenLogprob | None]:
        if self._banned is not None:
            if forced is not None:
                return forced, None
            token = self._source.likeliest(slot, row)
            if token not in self._banned:
                return token, None
        try:
            return self._sampler.sample(self._source.logits(slot, row), forced)
        except NothingAllowed:
            raise GrammarFailed(
                "none of the model's tokens is allowed here by the schema or grammar, logit_bias and ignore_eos; "
                "loosen one of them"
            ) from None

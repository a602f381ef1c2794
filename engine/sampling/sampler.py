"""How the next token is sampled from logits: numpy only, and the same for the same seed and position.

The randomness of a token depends on the seed and on the token's place in the output, not on what was drawn before. So
a sequence goes on exactly anywhere: what is needed is its tokens, and one number with mirostat.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellama.engine.request import SamplingParams, TokenLogprob

from .filters import (
    Ids,
    Logits,
    Values,
    min_p,
    min_p_candidates,
    mirostat_top_k,
    softmax,
    sorted_candidates,
    tempered,
    top_ids,
    top_p,
    top_p_candidates,
    typical,
)
from .processors import LogitsProcessor

_FIRST_LOOK = 256  # candidates that a grammar is asked about before the whole vocabulary


class TokenConstraint(Protocol):
    """Allows some tokens and forbids others, depending on what was accepted."""

    def allows(self, tokens: Ids) -> NDArray[np.bool_]:
        """Which of these tokens may come next."""
        ...

    def mask(self) -> NDArray[np.bool_] | None:
        """Which of all tokens may come next; None where `allows` of a few tokens costs much less."""
        ...

    def accept(self, token: int) -> None:
        """An allowed token comes next."""
        ...

    def forced_tokens(self) -> list[int]:
        """The tokens of a text that there is no choice about."""
        ...


class TokenSampler:
    """Chooses the tokens of one sequence, one after another."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        processors: Sequence[LogitsProcessor] = (),
        *,
        constraint: TokenConstraint | None = None,
        num_sampled: int = 0,
        mirostat_mu: float | None = None,
    ) -> None:
        """`processors` have accepted the tokens so far, of which the last `num_sampled` were sampled before.

        `mirostat_mu` is what mirostat had learned by then.
        """
        self._params = params
        self._seed = seed
        self._processors = processors
        self._constraint = constraint
        self.num_sampled = num_sampled
        self.mirostat_mu = 2 * params.mirostat_tau if mirostat_mu is None else mirostat_mu

    def constrain(self, constraint: TokenConstraint) -> None:
        """From now on the constraint holds."""
        self._constraint = constraint

    def sample(self, logits: Logits, forced: int | None = None) -> tuple[int, TokenLogprob | None]:
        """The next token, which counts as sampled: `forced`, unless that is None or the constraint forbids it.

        Changes `logits`. Raises NothingAllowed.
        """
        top = self._params.logprobs
        raw = logits.copy() if top is not None and self._processors else logits
        report = _LogprobReport(raw, top) if top is not None else None
        if forced is not None and (self._constraint is None or self._constraint.allows(np.array([forced]))[0]):
            self._accept(forced)
            return forced, report.of(forced) if report else None
        for processor in self._processors:
            processor.apply(logits)
        token = self._pick(logits, "draw")
        if self._constraint is not None and not self._constraint.allows(np.array([token]))[0]:
            token = self._pick_allowed(logits, self._constraint)
        self._learn_surprise()
        self._accept(token)
        return token, report.of(token) if report else None

    def _pick_allowed(self, logits: Logits, constraint: TokenConstraint) -> int:
        """Chooses among what the constraint allows. Without a mask that is most often seen from the likeliest few."""
        mask = constraint.mask()
        if mask is not None:
            return self._pick(logits, "second draw", np.flatnonzero(mask))
        needed = 1 if self._params.is_greedy else self._params.top_k
        if needed:
            ids = top_ids(logits, max(_FIRST_LOOK, 4 * needed))
            ids = ids[logits[ids] > -np.inf]
            allowed = np.sort(ids[constraint.allows(ids)])
            if len(allowed) >= needed:
                return self._pick(logits, "second draw", allowed)
        ids = np.flatnonzero(logits > -np.inf)
        return self._pick(logits, "second draw", ids[constraint.allows(ids)])

    def _pick(self, logits: Logits, purpose: str, among: Ids | None = None) -> int:
        """A token of all, or of those in `among`, which are in order. Raises NothingAllowed."""
        if among is not None:
            logits = logits[among]
        if not len(logits):
            raise NothingAllowed
        likeliest = int(logits.argmax())
        if not logits[likeliest] > -np.inf:  # or there is no number at all
            raise NothingAllowed
        if self._params.is_greedy:
            return likeliest if among is None else int(among[likeliest])
        if among is not None and len(among) == 1:
            self._surprise = 0.0
            return int(among[0])
        ids, values = self.candidates(logits)
        if among is not None:
            ids = among[ids]
        at = self._draw(ids, values, purpose)
        if self._params.mirostat:
            self._surprise = -math.log2(max(softmax(values)[at], 1e-300))
        return int(ids[at])

    def candidates(self, logits: Logits) -> tuple[Ids, Values]:
        """The tokens that are left to draw from, and their logits: after filters and temperature, in llama.cpp's order.

        With mirostat, which replaces the filters, temperature comes first.
        """
        params = self._params
        if params.mirostat:
            return self._mirostat_candidates(logits)
        if params.keeps_by_min_p_alone:
            ids, values = min_p_candidates(logits, params.min_p)
            return ids, tempered(values, params.temperature)
        if params.top_k == 0 and params.typical_p >= 1 > params.top_p:
            ids, values = top_p_candidates(logits, params)
        else:
            ids, values = top_p(*typical(*sorted_candidates(logits, params.top_k), params), params)
        ids, values = self._exclude_top_choices(*min_p(ids, values, params))
        return ids, tempered(values, params.temperature)

    def _draw(self, ids: Ids, values: Values, purpose: str) -> int:
        """A place in `ids`, drawn with the probabilities that these logits mean.

        The Gumbel-max trick, with noise that belongs to the token: when another batch shape changes logits in their
        last bits, the draw stays the same, unless two tokens come out equal.
        """
        if len(ids) == 1:
            return 0
        noise = -np.log(-np.log(uniforms(self._seed, self.num_sampled, purpose, ids)))
        return int((values + noise).argmax())

    def _exclude_top_choices(self, ids: Ids, values: Values) -> tuple[Ids, Values]:
        """XTC: now and then leaves out all but the last of the likely tokens."""
        params = self._params
        if not params.xtc_probability or len(ids) < 2:
            return ids, values
        if uniforms(self._seed, self.num_sampled, "xtc", np.zeros(1, np.int64))[0] > params.xtc_probability:
            return ids, values
        likely = int((softmax(values) >= params.xtc_threshold).sum())
        first = max(0, likely - 1)
        return ids[first:], values[first:]

    def _mirostat_candidates(self, logits: Logits) -> tuple[Ids, Values]:
        """Keeps the surprise of the text near tau. Basu et al. 2021, arXiv:2007.14966; versions 1 and 2."""
        ids, values = sorted_candidates(logits, 0)
        values = tempered(values, self._params.temperature)
        probabilities = softmax(values)
        if self._params.mirostat == 1:
            count = mirostat_top_k(probabilities, self.mirostat_mu)
        else:
            count = int((-np.log2(np.maximum(probabilities, 1e-300)) <= self.mirostat_mu).sum())
        count = max(1, count)
        return ids[:count], values[:count]

    def _learn_surprise(self) -> None:
        if self._params.mirostat and not self._params.is_greedy:
            self.mirostat_mu -= self._params.mirostat_eta * (self._surprise - self._params.mirostat_tau)

    def _accept(self, token: int) -> None:
        for processor in self._processors:
            processor.accept(token)
        if self._constraint is not None:
            self._constraint.accept(token)
        self.num_sampled += 1


class NothingAllowed(Exception):
    """No token that the constraint and the biases allow has a probability."""


class _LogprobReport:
    """Log-probabilities of one step, before anything changes the logits."""

    def __init__(self, logits: Logits, num_top: int) -> None:
        best = float(logits.max())
        self._normaliser = best + math.log(float(np.exp(logits - best, dtype=np.float32).sum(dtype=np.float64)))
        self._logits = logits
        ids = top_ids(logits, num_top)[:num_top] if num_top else ()
        self._top = tuple((int(i), float(logits[i]) - self._normaliser) for i in ids)

    def of(self, token: int) -> TokenLogprob:
        return TokenLogprob(token, float(self._logits[token]) - self._normaliser, self._top)


def uniforms(seed: int, position: int, purpose: str, ids: Ids) -> Values:
    """A number in (0, 1) for each id, that depends on the arguments alone: splitmix64 of all of them."""
    key = (seed << 32 | position) ^ zlib.crc32(purpose.encode()) << 16
    state = ids.astype(np.uint64) + np.uint64(_mix(key))
    state = state * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(value: int) -> int:
    """splitmix64 of one number."""
    mask = (1 << 64) - 1
    value = value + 0x9E3779B97F4A7C15 & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31

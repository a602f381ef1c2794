"""Filter and sample the next token from logits with numpy only.

A token's randomness depends on the seed and on the token's position in the output, not on earlier draws. Therefore, the
tokens alone are enough to resume a sequence at any position with the same result. Mirostat also needs its state, which
is a single number.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cellama.engine.request import SamplingParams, TokenLogprob

from .processors import Logits, LogitsProcessor

Ids = NDArray[np.int64]
Values = NDArray[np.float64]
_BLOCK = 64  # tokens that share a maximum (docs/adr/009-sampling.md)
_FIRST_DEPTH = 4.0  # distance below the highest logit at which top-p starts to search
_NOTHING_BELOW = 800.0  # distance below the highest logit at which a probability is 0
_ROUNDING = 1e-9  # tolerance for sums of probabilities
_MIROSTAT_M = 100  # number of tokens that the estimate of mirostat 1 uses


def softmax(values: Values) -> Values:
    """Convert logits to probabilities, in the same order."""
    exponents: Values = np.exp(values - values.max())
    exponents /= exponents.sum()
    return exponents


def top_ids(logits: Logits, count: int) -> Ids:
    """Return at least the `count` likeliest tokens, sorted by decreasing likelihood, then by id.

    Impossible tokens may be omitted. The block maxima give a lower bound for the result, so only a few tokens need to
    be sorted. Each block consists of every `width`-th token. The maxima can then be computed in vector registers, nine
    times as fast as with adjacent tokens.
    """
    if not 0 < count < len(logits):
        return _sorted(np.arange(len(logits)), logits)
    width = len(logits) // _BLOCK
    if count >= width:
        return _sorted(np.flatnonzero(logits >= np.partition(logits, -count)[-count]), logits)
    blocks = logits[: width * _BLOCK].reshape(_BLOCK, width)
    maxima = blocks.max(axis=0)
    bound = np.partition(maxima, width - count)[width - count]
    if bound == -np.inf:
        return _sorted(np.flatnonzero(logits > -np.inf), logits)
    columns = np.flatnonzero(maxima >= bound)
    rows, places = np.nonzero(blocks[:, columns] >= bound)
    rest = np.flatnonzero(logits[width * _BLOCK :] >= bound) + width * _BLOCK
    return _sorted(np.concatenate([rows * width + columns[places], rest]), logits)


def _sorted(ids: Ids, logits: Logits) -> Ids:
    """Sort token ids by decreasing likelihood. Equally likely tokens keep their order."""
    return ids[np.argsort(-logits[ids], kind="stable")]


def sorted_candidates(logits: Logits, top_k: int) -> tuple[Ids, Values]:
    ids = top_ids(logits, top_k)
    ids = ids[:top_k] if top_k else ids
    values = logits[ids].astype(np.float64)
    possible = values > -np.inf
    return ids[possible], values[possible]


def min_p_candidates(logits: Logits, min_p: float) -> tuple[Ids, Values]:
    """Apply `min_p` to all tokens without sorting the vocabulary."""
    bound = logits.max() + math.log(min_p) if min_p > 0 else np.finfo(np.float32).min
    ids = np.flatnonzero(logits >= bound)
    return ids, logits[ids].astype(np.float64)


def top_p_candidates(logits: Logits, params: SamplingParams) -> tuple[Ids, Values]:
    """Apply `top_p` to all tokens. Only the likeliest tokens are sorted, because `top_p` removes all other tokens."""
    best = float(logits.max())
    weights = np.exp(logits - np.float64(best))
    total, needed, depth = weights.sum(), params.top_p + _ROUNDING, _FIRST_DEPTH
    ids = np.flatnonzero(logits >= best - depth)
    while weights[ids].sum() < needed * total and depth < _NOTHING_BELOW:
        depth *= 1.5
        ids = np.flatnonzero(logits >= best - depth)
    ids = _sorted(ids, logits)
    count = int(((weights[ids] / total).cumsum() < params.top_p).sum()) + 1
    return ids[:count], logits[ids[:count]].astype(np.float64)


def typical(ids: Ids, values: Values, params: SamplingParams) -> tuple[Ids, Values]:
    """Keep the tokens whose surprise is near the mean surprise (Meister et al. 2022, arXiv:2202.00666)."""
    if params.typical_p >= 1:
        return ids, values
    probabilities = softmax(values)
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    order = np.argsort(np.abs(surprise - (probabilities * surprise).sum()), kind="stable")
    count = int((probabilities[order].cumsum() <= params.typical_p).sum()) + 1
    chosen = np.sort(order[:count])
    return ids[chosen], values[chosen]


def top_p(ids: Ids, values: Values, params: SamplingParams) -> tuple[Ids, Values]:
    if params.top_p >= 1:
        return ids, values
    count = int((softmax(values).cumsum() < params.top_p).sum()) + 1
    return ids[:count], values[:count]


def min_p(ids: Ids, values: Values, params: SamplingParams) -> tuple[Ids, Values]:
    if params.min_p <= 0:
        return ids, values
    likely = values >= values[0] + math.log(params.min_p)
    return ids[likely], values[likely]


def above_n_sigma(logits: Logits, n: float) -> Logits:
    """Return a copy of the logits in which tokens far below the highest logit are forbidden.

    The cutoff is the highest logit minus `n` standard deviations of all finite logits (Tang et al. 2024,
    arXiv:2411.07641).
    """
    possible = logits[logits > -np.inf].astype(np.float64)
    limit = possible.max() - n * possible.std()
    return np.where(logits >= limit, logits, np.float32(-np.inf))


def dynamic_temperature(values: Values, params: SamplingParams) -> float:
    """Return a temperature that grows with the entropy of the candidates, within `dynatemp_range` of `temperature`."""
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    probabilities = softmax(values)
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    entropy = float((probabilities * surprise).sum()) / math.log(len(values))
    return low + (high - low) * math.pow(min(1.0, entropy), params.dynatemp_exponent)


def mirostat_top_k(probabilities: Values, mu: float) -> int:
    """Return the number of tokens that mirostat 1 keeps: (ε·2^μ / (1 - N^-ε))^(1/s).

    The formula is computed with logarithms, because μ has no upper bound.
    """
    head = probabilities[:_MIROSTAT_M]
    head = head[head > 0]
    if len(head) < 2:
        return 1
    ranks = np.log(np.arange(2, len(head) + 1) / np.arange(1, len(head)))
    drops = np.log(head[:-1] / head[1:])
    exponent = max(float((ranks * drops).sum() / (ranks * ranks).sum()), 1e-6)
    epsilon = exponent - 1
    if abs(epsilon) < 1e-9:
        epsilon = 1e-9
    scale = epsilon / -math.expm1(-epsilon * math.log(len(probabilities)))
    log_count = (math.log(scale) + mu * math.log(2)) / exponent
    return len(probabilities) if log_count >= math.log(len(probabilities)) else int(math.exp(log_count))


def tempered(values: Values, temperature: float) -> Values:
    """Apply a temperature to logits after subtracting the highest logit. The temperature may be very close to 0."""
    with np.errstate(over="ignore"):
        tempered: Values = (values - values.max()) / temperature
    return tempered


_FIRST_LOOK = 256  # candidates that a grammar checks before the whole vocabulary


class TokenConstraint(Protocol):
    """Allows some tokens and forbids others, depending on the accepted tokens."""

    def allows(self, tokens: Ids) -> NDArray[np.bool_]:
        """Return whether each of these tokens may come next."""
        ...

    def mask(self) -> NDArray[np.bool_] | None:
        """Return whether each token may come next, or None if calling `allows` for a few tokens is much faster."""
        ...

    def accept(self, token: int) -> None:
        """Record the next token, which must be allowed."""
        ...

    def forced_tokens(self) -> list[int]:
        """Return the tokens of the text that must come next, or an empty list if there is a choice."""
        ...


class RowDraw(NamedTuple):
    """A draw of a sequence's next token from a row of logits (`joint.py`)."""

    row: int
    params: SamplingParams
    processors: Sequence[LogitsProcessor]
    seed: int
    position: int  # number of tokens sampled before


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
        """Create a sampler that continues after the tokens that `processors` have already accepted.

        The last `num_sampled` of these tokens were sampled. `mirostat_mu` is the state of mirostat after these tokens.
        """
        self._params = params
        self._seed = seed
        self._processors = processors
        self._constraint = constraint
        self.num_sampled = num_sampled
        self._can_draw_jointly = params.draws_from_top_k
        self._drawn: int | None = None  # token that was drawn jointly
        self._processed_at = -1  # position of the token whose logits the processors have changed
        self.mirostat_mu = 2 * params.mirostat_tau if mirostat_mu is None else mirostat_mu

    def constrain(self, constraint: TokenConstraint) -> None:
        """Apply the constraint to all tokens that follow."""
        self._constraint = constraint

    def draw_of(self, row: int) -> RowDraw | None:
        """Return the draw of the next token from this row of logits, or None if it can't be drawn jointly."""
        if not self._can_draw_jointly:
            return None
        return RowDraw(row, self._params, self._processors, self._seed, self.num_sampled)

    def use_drawn(self, token: int | None) -> None:
        """Let the next call of `sample` use the result of a joint draw, for which the processors have been applied.

        If the result is None, the next call draws the token.
        """
        self._drawn, self._processed_at = token, self.num_sampled

    def sample(self, logits: Logits, forced: int | None = None) -> tuple[int, TokenLogprob | None]:
        """Sample the next token, or choose `forced` if it is set and the constraint allows it.

        This method modifies `logits`. Raises NothingAllowed if no token can be sampled.
        """
        top = self._params.logprobs
        raw = logits.copy() if top is not None and self._processors else logits
        report = _LogprobReport(raw, top) if top is not None else None
        if forced is not None and (self._constraint is None or self._constraint.allows(np.array([forced]))[0]):
            self._accept(forced)
            return forced, report.of(forced) if report else None
        is_processed = self._processed_at == self.num_sampled
        if not is_processed:
            for processor in self._processors:
                processor.apply(logits)
        token = self._drawn if is_processed and self._drawn is not None else self._pick(logits, "draw")
        if self._constraint is not None and not self._constraint.allows(np.array([token]))[0]:
            token = self._pick_allowed(logits, self._constraint)
        self._learn_surprise()
        self._accept(token)
        return token, report.of(token) if report else None

    def _pick_allowed(self, logits: Logits, constraint: TokenConstraint) -> int:
        """Sample one of the allowed tokens. Without a mask, checking the few likeliest tokens is usually enough."""
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
        """Sample from all tokens, or only from the sorted tokens in `among`.

        Raises NothingAllowed if no token is possible.
        """
        if among is not None:
            logits = logits[among]
        if not len(logits):
            raise NothingAllowed
        likeliest = int(logits.argmax())
        if not logits[likeliest] > -np.inf:  # also true if all logits are NaN
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
        """Return the tokens to draw from and their logits.

        The filters and the temperature are applied in llama.cpp's order. Mirostat replaces the filters and is applied
        after the temperature.
        """
        params = self._params
        if params.mirostat:
            return self._mirostat_candidates(logits)
        if params.top_n_sigma > 0:
            logits = above_n_sigma(logits, params.top_n_sigma)
        if params.keeps_by_min_p_alone:
            return self._tempered(*min_p_candidates(logits, params.min_p))
        if params.top_k == 0 and params.typical_p >= 1 > params.top_p:
            ids, values = top_p_candidates(logits, params)
        else:
            ids, values = top_p(*typical(*sorted_candidates(logits, params.top_k), params), params)
        return self._tempered(*self._exclude_top_choices(*min_p(ids, values, params)))

    def _tempered(self, ids: Ids, values: Values) -> tuple[Ids, Values]:
        """Apply the temperature to the candidates. A temperature of 0 keeps only the likeliest candidate."""
        temperature = self._params.temperature
        if self._params.dynatemp_range > 0 and len(ids) > 1:
            temperature = dynamic_temperature(values, self._params)
        if temperature <= 0:
            best = int(values.argmax())
            ids, values, temperature = ids[best : best + 1], values[best : best + 1], 1.0
        return ids, tempered(values, temperature)

    def _draw(self, ids: Ids, values: Values, purpose: str) -> int:
        """Return an index into `ids`, drawn according to the probabilities of these logits.

        This method uses the Gumbel-max trick with noise that depends on the token. If a different batch shape changes
        the lowest bits of the logits, the draw stays the same unless two tokens are nearly tied.
        """
        if len(ids) == 1:
            return 0
        noise = -np.log(-np.log(uniforms(self._seed, self.num_sampled, purpose, ids)))
        return int((values + noise).argmax())

    def _exclude_top_choices(self, ids: Ids, values: Values) -> tuple[Ids, Values]:
        """Apply XTC, which sometimes removes every likely token except the least likely one."""
        params = self._params
        if not params.xtc_probability or len(ids) < 2:
            return ids, values
        if uniforms(self._seed, self.num_sampled, "xtc", np.zeros(1, np.int64))[0] > params.xtc_probability:
            return ids, values
        likely = int((softmax(values) >= params.xtc_threshold).sum())
        first = max(0, likely - 1)
        return ids[first:], values[first:]

    def _mirostat_candidates(self, logits: Logits) -> tuple[Ids, Values]:
        """Keep the surprise of the text near tau (Basu et al. 2021, arXiv:2007.14966, versions 1 and 2)."""
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
    """Raised if the constraint and the biases together exclude all tokens."""


class _LogprobReport:
    """The log-probabilities at one token position, based on the unmodified logits."""

    def __init__(self, logits: Logits, num_top: int) -> None:
        best = float(logits.max())
        self._normaliser = best + math.log(float(np.exp(logits - best, dtype=np.float32).sum(dtype=np.float64)))
        self._logits = logits
        ids = top_ids(logits, num_top)[:num_top] if num_top else ()
        self._top = tuple((int(i), float(logits[i]) - self._normaliser) for i in ids)

    def of(self, token: int) -> TokenLogprob:
        return TokenLogprob(token, float(self._logits[token]) - self._normaliser, self._top)


def uniforms(seed: int, position: int, purpose: str, ids: Ids) -> Values:
    """Return a number in (0, 1) for each id.

    The numbers depend only on the arguments, and are computed with splitmix64.
    """
    state = ids.astype(np.uint64) + np.uint64(_mix(_key(seed, position, purpose)))
    return _fractions(_scrambled(state * np.uint64(_INCREMENT)))


def row_uniforms(draws: Sequence[tuple[int, int]], purpose: str, ids: Ids) -> Values:
    """Return the same numbers as `uniforms` for an array of ids with one row for each (seed, position)."""
    keys = np.array([_key(seed, position, purpose) for seed, position in draws], np.uint64)
    mixed = _scrambled(keys + np.uint64(_INCREMENT))
    return _fractions(_scrambled((ids.astype(np.uint64) + mixed[:, None]) * np.uint64(_INCREMENT)))


_INCREMENT = 0x9E3779B97F4A7C15
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _key(seed: int, position: int, purpose: str) -> int:
    return (seed << 32 | position) ^ zlib.crc32(purpose.encode()) << 16


def _mix(value: int) -> int:
    """Apply splitmix64 to one number."""
    mask = (1 << 64) - 1
    value = value + _INCREMENT & mask
    value = (value ^ value >> 30) * _FACTORS[0] & mask
    value = (value ^ value >> 27) * _FACTORS[1] & mask
    return value ^ value >> 31


def _scrambled(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the last steps of splitmix64 to all numbers."""
    state = (state ^ state >> np.uint64(30)) * np.uint64(_FACTORS[0])
    state = (state ^ state >> np.uint64(27)) * np.uint64(_FACTORS[1])
    return state ^ state >> np.uint64(31)


def _fractions(state: NDArray[np.uint64]) -> Values:
    fractions: Values = ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return fractions

"""Which tokens are left to choose from: top-k, top-p, min-p, typical, and what mirostat keeps. Pure."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cellama.engine.request import SamplingParams

Logits = NDArray[np.float32]  # of the whole vocabulary
Ids = NDArray[np.int64]
Values = NDArray[np.float64]
_BLOCK = 64  # tokens with one maximum (docs/adr/009-sampling.md)
_FIRST_DEPTH = 4.0  # below the highest logit, where top-p looks first
_NOTHING_BELOW = 800.0  # below the highest logit a probability is 0
_ROUNDING = 1e-9  # of sums of probabilities
_MIROSTAT_M = 100  # tokens that mirostat 1 estimates from


def softmax(values: Values) -> Values:
    """Probabilities of logits, highest first or not."""
    exponents: Values = np.exp(values - values.max())
    exponents /= exponents.sum()
    return exponents


def top_ids(logits: Logits, count: int) -> Ids:
    """At least the `count` likeliest tokens, the likeliest first; equal ones in the order of their ids.

    If fewer tokens are possible, the others may be left out.
    The maxima of blocks tell a bound that the wanted ones reach, so that only few are sorted. A block is every
    `width`-th token, not neighbours: so the maxima of all are found in vector registers, nine times as fast.
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
    """The likeliest first; equal ones in the order in which they are."""
    return ids[np.argsort(-logits[ids], kind="stable")]


def sorted_candidates(logits: Logits, top_k: int) -> tuple[Ids, Values]:
    ids = top_ids(logits, top_k)
    ids = ids[:top_k] if top_k else ids
    values = logits[ids].astype(np.float64)
    possible = values > -np.inf
    return ids[possible], values[possible]


def min_p_candidates(logits: Logits, min_p: float) -> tuple[Ids, Values]:
    """As `_min_p`, without sorting the vocabulary."""
    bound = logits.max() + math.log(min_p) if min_p > 0 else np.finfo(np.float32).min
    ids = np.flatnonzero(logits >= bound)
    return ids, logits[ids].astype(np.float64)


def top_p_candidates(logits: Logits, params: SamplingParams) -> tuple[Ids, Values]:
    """As `top_p` of all tokens, but sorts no more of them than those that are about as likely as what is kept."""
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
    """Tokens whose surprise is near the mean surprise. Meister et al. 2022, arXiv:2202.00666."""
    if params.typical_p >= 1:
        return ids, values
    probabilities = softmax(values)
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    order = np.argsort(np.abs(surprise - (probabilities * surprise).sum()), kind="stable")
    count = int((probabilities[order].cumsum() <= params.typical_p).sum()) + 1
    kept = np.sort(order[:count])
    return ids[kept], values[kept]


def top_p(ids: Ids, values: Values, params: SamplingParams) -> tuple[Ids, Values]:
    if params.top_p >= 1:
        return ids, values
    count = int((softmax(values).cumsum() < params.top_p).sum()) + 1
    return ids[:count], values[:count]


def min_p(ids: Ids, values: Values, params: SamplingParams) -> tuple[Ids, Values]:
    if params.min_p <= 0:
        return ids, values
    kept = values >= values[0] + math.log(params.min_p)
    return ids[kept], values[kept]


def mirostat_top_k(probabilities: Values, mu: float) -> int:
    """How many tokens mirostat 1 keeps: (ε·2^μ / (1 - N^-ε))^(1/s), by logarithms, because μ grows without a bound."""
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
    """The logits, less the highest of them, at a temperature; it may be the smallest number above 0."""
    with np.errstate(over="ignore"):
        tempered: Values = (values - values.max()) / temperature
    return tempered

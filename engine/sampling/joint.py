"""Draw the tokens of several sequences together, which takes fewer numpy calls than drawing them one by one.

With 64 sequences, most of the time of a draw with `top_k` is spent between numpy's loops over a few candidates. This
module runs each of these loops once for all rows, or once per thread if the matrix is large. The results are the same
as those of `TokenSampler`, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .rows import RowThreads
from .sampler import Ids, RowDraw, Values, row_uniforms

MIN_ROWS = 6  # number of rows from which drawing together is faster than drawing one by one
_BLOCK = 32  # tokens that share a maximum: the maxima of a row fit into the processor's first cache
_WIDTH_RATIO = 8  # groups of blocks per candidate: fewer give a lower bound, and more take longer to compare
_MAX_RATIO = 4  # blocks above the bound per candidate: more blocks mean equal logits, whose rows are drawn separately


class JointDraw:
    """Draws from the rows of a matrix of logits. Only the engine thread may use it."""

    def __init__(self, n_vocab: int, threads: RowThreads) -> None:
        """Create an object that draws from the parts of large matrices on several threads."""
        self._threads = threads
        self._width = n_vocab // _BLOCK
        self._maxima: NDArray[np.float32] = np.empty((0, self._width), np.float32)

    def is_possible(self, top_k: int) -> bool:
        """Return whether the vocabulary is large enough for draws with this `top_k`."""
        return self._width > top_k

    def draw(self, logits: NDArray[np.float32], draws: Sequence[RowDraw]) -> list[int | None]:
        """Apply the processors to each row, and draw a token from it.

        The result is None for rows that must be drawn separately, after their processors have been applied. `logits`
        has the shape (rows, n_vocab). All draws have the same `top_k`, for which `is_possible` is true.
        """
        if len(self._maxima) < len(draws):
            self._maxima = np.empty((len(draws), self._width), np.float32)
        tokens: list[int | None] = [None] * len(draws)

        def draw_part(first: int, end: int) -> None:
            maxima = self._maxima[first:end]
            tokens[first:end] = self._draw_part(logits, draws[first:end], maxima)

        self._threads.run(draw_part, (len(draws), logits.shape[1]))
        return tokens

    def _draw_part(
        self, logits: NDArray[np.float32], draws: Sequence[RowDraw], maxima: NDArray[np.float32]
    ) -> list[int | None]:
        """Draw tokens as `draw` does. `maxima` is overwritten, and has the shape (draws, blocks)."""
        top_k, num, tokens = draws[0].params.top_k, len(draws), list[int | None]([None] * len(draws))
        self._read(logits, draws, maxima)
        size = max(1, self._width // (_WIDTH_RATIO * top_k))  # blocks per group
        num_groups = self._width // size
        groups = maxima[:, : size * num_groups].reshape(num, size, num_groups).max(axis=1)
        bounds = np.partition(groups, num_groups - top_k, axis=1)[:, num_groups - top_k]
        rows = np.array([draw.row for draw in draws])
        late = logits[rows, _BLOCK * self._width :]
        best = np.maximum(maxima.max(axis=1), late.max(axis=1, initial=-np.inf))
        above = np.flatnonzero(maxima >= bounds[:, None])
        is_usual = np.bincount(above // self._width, minlength=num) <= _MAX_RATIO * top_k
        is_usual &= np.isfinite(bounds) & np.isfinite(best)
        above = above[is_usual[above // self._width]]
        ids, values = self._top(logits, rows, bounds, above, top_k)
        usual = np.flatnonzero(is_usual).tolist()
        for index, token in zip(usual, _drawn(ids, values, [draws[index] for index in usual]), strict=True):
            tokens[index] = token
        return tokens

    def _read(self, logits: NDArray[np.float32], draws: Sequence[RowDraw], maxima: NDArray[np.float32]) -> None:
        """Apply the processors to each row, and write the maxima of its blocks to `maxima`.

        A block consists of every `width`-th token, and the last tokens of a row are in no block.
        """
        blocks = self._blocks(logits)
        for index, draw in enumerate(draws):
            for processor in draw.processors:
                processor.apply(logits[draw.row])
            np.maximum.reduce(blocks[draw.row], axis=0, out=maxima[index])

    def _blocks(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the blocks of all rows, with shape (rows, tokens of a block, blocks)."""
        return logits[:, : _BLOCK * self._width].reshape(len(logits), _BLOCK, self._width)

    def _top(
        self, logits: NDArray[np.float32], rows: Ids, bounds: NDArray[np.float32], above: Ids, top_k: int
    ) -> tuple[Ids, Values]:
        """Return the `top_k` likeliest tokens and their logits for each draw that has blocks in `above`.

        The tokens are sorted by decreasing likelihood, then by id. `above` contains indices of blocks whose maximum is
        not below the draw's bound. Each draw must have at least `top_k` of these blocks.
        """
        drawn, columns = above // self._width, above % self._width
        members = self._blocks(logits)[rows[drawn], :, columns]
        found = np.flatnonzero(members >= bounds[drawn, None])
        block, place = found // _BLOCK, found % _BLOCK
        ids, drawn = place * self._width + columns[block], drawn[block]
        if (first := _BLOCK * self._width) < logits.shape[1]:
            late, late_ids = np.nonzero(logits[rows, first:] >= bounds[:, None])
            is_usual = np.isin(late, drawn)
            ids, drawn = np.append(ids, late_ids[is_usual] + first), np.append(drawn, late[is_usual])
        values = logits[rows[drawn], ids]
        order = np.lexsort((ids, -values, drawn))
        starts = np.unique(drawn[order], return_index=True)[1]
        order = order[starts[:, None] + np.arange(top_k)]
        return ids[order], values[order].astype(np.float64)


def _drawn(ids: Ids, values: Values, draws: Sequence[RowDraw]) -> list[int]:
    """Draw a token from each row of sorted candidates, after `top_p`, `min_p` and the temperature are applied."""
    if not draws:
        return []
    shares = np.array([draw.params.top_p if draw.params.top_p < 1 else np.inf for draw in draws])
    depths = np.array([math.log(draw.params.min_p) if draw.params.min_p > 0 else -np.inf for draw in draws])
    temperatures = np.array([draw.params.temperature for draw in draws])
    below = values - values[:, :1]
    probabilities = np.exp(below)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    counts = (probabilities.cumsum(axis=1) < shares[:, None]).sum(axis=1) + 1
    is_kept = np.arange(values.shape[1]) < counts[:, None]
    is_kept &= values >= values[:, :1] + depths[:, None]
    with np.errstate(over="ignore"):
        tempered = below / temperatures[:, None]
    noise = -np.log(-np.log(row_uniforms([(draw.seed, draw.position) for draw in draws], "draw", ids)))
    chosen = np.where(is_kept, tempered + noise, -np.inf).argmax(axis=1)
    tokens: list[int] = ids[np.arange(len(ids)), chosen].tolist()
    return tokens

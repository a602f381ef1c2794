"""Counts of steps and of gaps between tokens, for whoever wants histograms of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class StepCounts:
    """How long sequences waited between two tokens, and how large batches were, in buckets.

    Written by the engine thread alone; any thread may copy the lists, and sees one gap or step half counted at worst.
    """

    def __init__(self, gap_bounds_s: Sequence[float], batch_bounds: Sequence[float]) -> None:
        """Upper bounds of the buckets, rising; what is above the last one has a bucket more."""
        self._gap_bounds_s, self._batch_bounds = tuple(gap_bounds_s), tuple(batch_bounds)
        self.gaps = [0] * (len(self._gap_bounds_s) + 1)
        self.gaps_s = 0.0  # their sum
        self.batches = [0] * (len(self._batch_bounds) + 1)
        self.tokens = 0  # of all batches

    def gap(self, seconds: float) -> None:
        """A sequence has a token so long after the one before."""
        self.gaps[bisect_left(self._gap_bounds_s, seconds)] += 1
        self.gaps_s += seconds

    def step(self, num_tokens: int) -> None:
        """A step ended, with so many tokens in its batch."""
        self.batches[bisect_left(self._batch_bounds, num_tokens)] += 1
        self.tokens += num_tokens

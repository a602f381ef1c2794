"""Seconds of a pass by its rows, as measured: each size by itself, others by their neighbours. Pure."""

from __future__ import annotations

from bisect import bisect_left

PASS_ROWS = 16  # beyond what was measured, a pass costs as much as so many rows
WEIGHT = 0.2  # of a new value in a running mean
MOST_AT_ONCE = 2.0  # times the mean: what is longer was the machine being busy
DOUBT = 0.4  # the share by which a guess may be too high …
AGEING = 0.0004  # … and with each later pass a measured one
TRUSTED = 4  # measurements


class Curve:
    """Learns what passes take on this machine."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # that were measured, ascending
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._measured_at: dict[int, int] = {}
        self._clock = 0

    def is_known(self, rows: int) -> bool:
        """True if passes of exactly so many rows were measured often enough to compare others with."""
        return self._counts.get(rows, 0) >= TRUSTED

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        self._clock += 1
        count = self._counts[rows] = self._counts.get(rows, 0) + 1
        self._measured_at[rows] = self._clock
        if count == 1:
            self._sizes.insert(bisect_left(self._sizes, rows), rows)
            self._seconds[rows] = seconds
            return
        before = self._seconds[rows]
        self._seconds[rows] += (min(seconds, MOST_AT_ONCE * before) - before) * max(WEIGHT, 1 / count)

    def expected(self, rows: int) -> float:
        """Seconds of a pass; before the first measurement only ratios mean something."""
        known = self._seconds.get(rows)
        if known is not None:
            return known
        if not self._sizes:
            return float(rows + PASS_ROWS)
        at = bisect_left(self._sizes, rows)
        if at == 0:
            return self._seconds[self._sizes[0]]
        low = self._sizes[at - 1]
        if at == len(self._sizes):
            return self._seconds[low] * (rows + PASS_ROWS) / (low + PASS_ROWS)
        high = self._sizes[at]
        share = (rows - low) / (high - low)
        return self._seconds[low] + share * (self._seconds[high] - self._seconds[low])

    def hoped(self, rows: int) -> float:
        """Seconds of a pass if all is well: less than expected as far as that is hardly known, or long ago."""
        measured_at = self._measured_at.get(rows)
        doubt = DOUBT if measured_at is None else min(DOUBT, AGEING * (self._clock - measured_at))
        return self.expected(rows) * (1 - doubt)

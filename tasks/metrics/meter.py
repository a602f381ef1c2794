"""Counters and histograms that any thread adds to."""

from __future__ import annotations

import threading
from bisect import bisect_left

from .families import Figures
from .table import TABLE


class Meter:
    """One lock for all, held for a few additions: each happens once per request, attempt or answer, not per token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures = Figures()

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Adds to a counter."""
        with self._lock:
            self._figures.add(name, by, *labels)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Adds a value to a histogram; one that is below 0 (clocks) counts as 0."""
        value = max(0.0, value)
        with self._lock:
            tally = self._figures.tally(name, *labels)
            tally.counts[bisect_left(TABLE[name].bounds, value)] += 1
            tally.total += value

    def add_to(self, figures: Figures) -> None:
        """Puts all that was counted into these. Any thread."""
        with self._lock:
            for name, values in self._figures.numbers.items():
                for labels, value in values.items():
                    figures.add(name, value, *labels)
            for name, tallies in self._figures.tallies.items():
                for labels, tally in tallies.items():
                    figures.tally(name, *labels).add(tally.counts, tally.total)

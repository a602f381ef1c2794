"""Sweep over setups: choose which setups to measure, in which order, and which setup to use.

The measuring function and the clock are passed in, so tests don't need a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cellama.engine.models.tuned_options import Measurement, Setup
from cellama.engine.options import DEFAULT_SLOTS, DEFAULT_UBATCH

TIE = 0.98  # share of the best rate that counts as equal: about the difference of two measurements of one setup
FALLING = 0.9  # share of the best rate below which the loss is not noise, so smaller values are not measured
DISTURBED = 0.6  # share of the best rate below which another program may have interfered with the measurement
MAX_SLOTS = 64  # number of slots: doubling it doubles a measurement's requests, which must fit into the default time
UBATCHES = (64, 128, 256, 512, 1024)  # tokens


@dataclass(frozen=True, slots=True)
class SweepLimits:
    """The largest values to try."""

    threads: int
    slots: int = MAX_SLOTS
    step_tokens: int = DEFAULT_UBATCH  # n_batch: a larger n_ubatch makes no difference
    generates: bool = True  # False for an embedding model, for which only the threads matter

    @property
    def values(self) -> dict[str, Sequence[Any]]:
        """The values to try for each option, in ascending order. Options are varied in the order of this dictionary."""
        threads: dict[str, Sequence[Any]] = {"threads": thread_counts(self.threads)}
        if not self.generates:
            return threads
        slots = [1 << power for power in range(self.slots.bit_length())]
        ubatches = sorted({self.start_ubatch, *(size for size in UBATCHES if size <= self.step_tokens)})
        return threads | {"n_parallel": slots, "kv_layout": ("partitioned", "unified"), "n_ubatch": ubatches}

    @property
    def start(self) -> Setup:
        if not self.generates:
            return Setup(self.threads)
        slots = min(DEFAULT_SLOTS, 1 << (self.slots.bit_length() - 1))
        layout: Literal["partitioned", "unified"] = "partitioned" if slots > 1 else "unified"
        return Setup(self.threads, n_parallel=slots, kv_layout=layout, n_ubatch=self.start_ubatch)

    @property
    def start_ubatch(self) -> int:
        return min(DEFAULT_UBATCH, self.step_tokens)


def thread_counts(max_threads: int) -> list[int]:
    """Return the thread counts to try.

    The counts are the maximum, the numbers obtained by halving it repeatedly, and the midpoints between these numbers.
    """
    counts, count = {max_threads, 1}, max_threads
    while count > 1:
        counts |= {count, (count + count // 2) // 2} if count >= 4 else {count}
        count //= 2
    return sorted(counts)


def choose(rows: Iterable[Measurement]) -> Measurement | None:
    """Return the fastest setup.

    Among setups within 2% of its rate, prefer fewer slots, then fewer threads, then defaults.
    """
    rows = list(rows)
    best = max((row.tokens_per_s for row in rows), default=0.0)

    def cost(row: Measurement) -> tuple[int, int, bool, int]:
        setup = row.setup
        distance = abs(DEFAULT_UBATCH - (setup.n_ubatch or DEFAULT_UBATCH))
        return setup.n_parallel or 0, setup.threads, setup.kv_layout == "unified", distance

    return min((row for row in rows if row.tokens_per_s >= TIE * best), key=cost, default=None)


@dataclass(slots=True)
class Sweep:
    """Varies the options of the best setup one by one until no change improves the rate.

    `measure` returns None for a setup that does not fit or takes too long. A measurement starts only if it is expected
    to end before the deadline. `rows` contains one result for each setup, in order of measurement.
    """

    measure: Callable[[Setup], Measurement | None]
    limits: SweepLimits
    deadline: float  # as a time of `clock`
    clock: Callable[[], float] = time.monotonic
    rows: list[Measurement] = field(default_factory=list)
    skipped: set[Setup] = field(default_factory=set)  # setups that were not measured for lack of time

    def run(self) -> Measurement | None:
        """Measure setups and return the chosen measurement, or None if no setup could be measured."""
        self._rate(self.limits.start)
        before = None
        while (best := choose(self.rows)) is not None and best != before:
            before = best
            for name, values in self.limits.values.items():
                self._vary((choose(self.rows) or best).setup, name, values)
        return best

    def _vary(self, setup: Setup, name: str, values: Sequence[Any]) -> None:
        """Measure larger values while the rate improves.

        If no larger value improves the rate, try smaller values until the rate drops to 10% below the best rate.
        """
        start = best = self._rate(setup)
        index = values.index(getattr(setup, name))
        for value in values[index + 1 :]:
            if (rate := self._rate(_changed(setup, name, value), best)) * TIE <= best:
                break
            best = rate
        if best > start:
            return
        for value in reversed(values[:index]):
            if (rate := self._rate(_changed(setup, name, value), best)) < FALLING * best:
                return
            best = max(best, rate)

    def _rate(self, setup: Setup, best: float = 0.0) -> float:
        """Return a setup's tokens per second, or 0 if it can't be measured.

        Setups with rates far below `best` are measured twice.
        """
        known = next((row for row in self.rows if row.setup == setup), None)
        if known is not None:
            return known.tokens_per_s
        if setup.n_parallel is not None and setup.n_parallel > (setup.n_ubatch or 0):
            return 0.0
        found: list[Measurement] = []
        while self._has_time(setup):
            row = self.measure(setup)
            if row is None:
                break
            found.append(row)
            if row.tokens_per_s >= DISTURBED * best or len(found) == 2:
                break
        if not found:
            return 0.0
        self.rows.append(max(found, key=lambda row: row.tokens_per_s))
        return self.rows[-1].tokens_per_s

    def _has_time(self, setup: Setup) -> bool:
        """Estimate whether a measurement would end in time, based on the shortest measurement and the slot count."""
        slots = setup.n_parallel or 1
        expected = [row.took_s * max(1.0, slots / (row.setup.n_parallel or 1)) for row in self.rows]
        if self.clock() + min(expected, default=0.0) <= self.deadline:
            return True
        self.skipped.add(setup)
        return False


def _changed(setup: Setup, name: str, value: Any) -> Setup:
    changed = replace(setup, **{name: value})
    return replace(changed, kv_layout="unified") if changed.n_parallel == 1 else changed  # one slot has no layouts

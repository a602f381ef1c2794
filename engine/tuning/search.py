"""Which way of running a model is the fastest on this machine: what is measured, in which order, and what is chosen.

Pure: measuring and the clock come from outside (measure.py), and so the search can be tested without a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from cellama.engine.models.tuned_options import Layout, Measured, Setup
from cellama.engine.options import DEFAULT_SLOTS, DEFAULT_UBATCH

TIE = 0.98  # of the best rate: from there on fewer slots and threads are better
FALLING = 0.9  # of the best rate: fewer threads than these are not worth a look
DOUBTFUL = 0.6  # of what the best rate promises for so many threads: it is measured again, in case it was disturbed
HOPELESS = 0.9  # of the other layout's rate: with more slots it is not tried again
LARGER_PASS = 1024  # tokens, beside the default …
SMALLER_UBATCHES = (256, 128, 64)  # … and if that gains nothing
MAX_SLOTS = 64


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is tried at most."""

    threads: int
    slots: int = MAX_SLOTS
    step_tokens: int = DEFAULT_UBATCH  # n_batch: larger passes make no difference
    generates: bool = True  # False: an embedding model, for which only the threads matter


def choose(rows: Iterable[Measured]) -> Measured | None:
    """The fastest; among those within 2 % of it fewer slots, then fewer threads, then what need not be set."""
    rows = list(rows)
    best = max((row.tokens_per_s for row in rows), default=0.0)
    near = [row for row in rows if row.tokens_per_s >= TIE * best]
    return min(near, key=lambda row: _cost(row.setup), default=None)


def _cost(setup: Setup) -> tuple[int, int, bool, int]:
    distance = abs(DEFAULT_UBATCH - (setup.n_ubatch or DEFAULT_UBATCH))
    return setup.n_parallel or 0, setup.threads, setup.kv_layout == "unified", distance


@dataclass(slots=True)
class Search:
    """A walk through setups, each from the best one so far: threads, slots with both layouts, tokens per pass.

    `measure` gives None for what does not fit or took too long. Nothing is begun that would not end before the
    deadline, judged by what was measured so far; `rows` has the results in order, each setup once.
    """

    measure: Callable[[Setup], Measured | None]
    bounds: Bounds
    deadline: float  # of `clock`
    clock: Callable[[], float] = time.monotonic
    rows: list[Measured] = field(default_factory=list)
    num_skipped: int = 0  # setups that there was no time for

    def run(self) -> Measured | None:
        """The chosen one; None if nothing could be measured."""
        if self.bounds.generates:
            slots = min(DEFAULT_SLOTS, self.bounds.slots)
            layout: Layout = "partitioned" if slots > 1 else "unified"
            start = Setup(self.bounds.threads, slots, layout, min(DEFAULT_UBATCH, self.bounds.step_tokens))
        else:
            start = Setup(self.bounds.threads)
        self._try_threads(start)
        if self.bounds.generates:
            self._try_slots()
            self._try_passes()
        return choose(self.rows)

    def _try(self, setup: Setup) -> float:
        """Its rate; 0 if it could not be measured."""
        known = next((row for row in self.rows if row.setup == setup), None)
        if known is not None:
            return known.tokens_per_s
        if self.clock() + self._expected_s(setup) > self.deadline:
            self.num_skipped += 1
            return 0.0
        row = self.measure(setup)
        if row is None:
            return 0.0
        promised = max((other.tokens_per_s * _share(setup, other.setup) for other in self.rows), default=0.0)
        if row.tokens_per_s < DOUBTFUL * promised and self.clock() + self._expected_s(setup) <= self.deadline:
            row = max(filter(None, (row, self.measure(setup))), key=lambda measured: measured.tokens_per_s)
        self.rows.append(row)
        return row.tokens_per_s

    def _expected_s(self, setup: Setup) -> float:
        """At best as long as others took, and longer with more slots: they have more to do."""
        slots = setup.n_parallel or 1
        return min((row.took_s * max(1.0, slots / (row.setup.n_parallel or 1)) for row in self.rows), default=0.0)

    def _best(self) -> Measured | None:
        return choose(self.rows)

    def _try_threads(self, start: Setup) -> None:
        best = 0.0
        for threads in thread_counts(self.bounds.threads):
            rate = self._try(replace(start, threads=threads))
            if rate < FALLING * best:
                return
            best = max(best, rate)

    def _try_slots(self) -> None:
        """Upwards as long as it gains, else downwards as long as it loses nothing."""
        base = self._best()
        if base is None or base.setup.n_parallel is None:
            return
        slots = base.setup.n_parallel
        layouts = self._try_layouts(base.setup, slots, ("partitioned", "unified"))
        best, count = self._rate(slots), slots
        while (count := 2 * count) <= self.bounds.slots:
            layouts = self._try_layouts(base.setup, count, layouts)
            if self._rate(count) * TIE <= best:
                break
            best = self._rate(count)
        if best > self._rate(slots):
            return
        while slots > 1:
            slots //= 2
            self._try_layouts(base.setup, slots, layouts)
            if self._rate(slots) < TIE * best:
                return

    def _try_layouts(self, setup: Setup, slots: int, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """Measures these layouts; returns those that are worth another look. One slot has no layouts."""
        if slots == 1:
            layouts = ("unified",)
        rates = {layout: self._try(replace(setup, n_parallel=slots, kv_layout=layout)) for layout in layouts}
        return tuple(layout for layout in layouts if rates[layout] >= HOPELESS * max(rates.values()))

    def _rate(self, slots: int) -> float:
        return max((row.tokens_per_s for row in self.rows if row.setup.n_parallel == slots), default=0.0)

    def _try_passes(self) -> None:
        best = self._best()
        if best is None:
            return
        larger = replace(best.setup, n_ubatch=LARGER_PASS)
        if self.bounds.step_tokens >= LARGER_PASS and self._try(larger) * TIE > best.tokens_per_s:
            return
        for size in SMALLER_UBATCHES:
            if (best.setup.n_parallel or 0) > size or size >= self.bounds.step_tokens:
                continue
            if self._try(replace(best.setup, n_ubatch=size)) < TIE * best.tokens_per_s:
                return


def _share(setup: Setup, other: Setup) -> float:
    """The part of another's threads that a setup has."""
    return min(1.0, setup.threads / other.threads)


def thread_counts(most: int) -> list[int]:
    """The numbers of threads to try, from all down: halves, and what lies in the middle of two of them."""
    counts, count = {most, 1}, most
    while count > 1:
        counts |= {count, (count + count // 2) // 2} if count >= 4 else {count}
        count //= 2
    return sorted(counts, reverse=True)

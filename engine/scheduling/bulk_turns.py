"""Which bulk work takes part in a step that readers wait for. Pure.

A step with all rows of a large bulk load in it, and prompts, may take ten times as long as one for the streams alone,
and each is a gap in every stream. But rows are cheapest in numbers. So as many decode beside the streams as a step has
time for, in turns, and bulk prompts are read in a share of the time. Where rows cost little, on a GPU, all take part.
"""

from __future__ import annotations

from collections.abc import Collection

FLUENT_S = 0.04  # a step may take so long: text comes faster than it is read
STRETCH = 1.5  # or, where that is more, so many times as long as one for the streams alone
FIRST_ROWS = 8
FEWER = 0.8  # of the rows, after a step that took too long; one more after one that did not
READ_S = 0.1  # a step in which bulk prompts are read may take so long at any time
READ_SHARE = 0.25  # of the time, for what such steps take beyond that
MOST_OWED_S = 2.0
OVERDUE_S = 2.0  # without a bulk prompt read: then one that is older than the interactive ones goes first
WEIGHT = 0.2  # of a new value in a running mean


class BulkTurns:
    """How many bulk rows decode beside streams, which ones, and when bulk prompts are read there."""

    def __init__(self) -> None:
        self._most_rows = FIRST_ROWS
        self._last_slot = -1  # of the rows that had their turn
        self._num_rows = 0  # of the step that was built last
        self._alone_s = 0.0  # that a step for streams alone takes, in the mean
        self._owed_s = 0.0  # of steps in which no bulk prompt is read
        self._unread_s = 0.0  # of steps since one was

    def rows(self, bulk: Collection[int]) -> list[int]:
        """The slots of those that decode in the next step: neighbours, which llama.cpp computes together."""
        self._most_rows = min(self._most_rows, max(FIRST_ROWS, len(bulk)))
        ahead = sorted(bulk, key=lambda slot: (slot <= self._last_slot, slot))
        chosen = ahead[: self._most_rows]
        self._num_rows = len(chosen)
        if chosen:
            self._last_slot = chosen[-1]
        return chosen

    def may_read(self, *, before_interactive: bool = False) -> bool:
        """True if it is the turn of bulk prompts, also of those that are older than interactive ones."""
        return self._owed_s <= 0 and (not before_interactive or self._unread_s > OVERDUE_S)

    def observe_decode(self, seconds: float) -> None:
        """A step that decoded these rows beside streams, and read nothing, took so long."""
        self._pass(seconds)
        if not self._num_rows:
            self._alone_s += (seconds - self._alone_s) * (WEIGHT if self._alone_s else 1.0)
        if seconds > max(FLUENT_S, STRETCH * self._alone_s):
            self._most_rows = int(self._most_rows * FEWER)
        else:
            self._most_rows += 1

    def observe_read(self, seconds: float, *, bulk: bool) -> None:
        """A step beside streams that read prompts took so long, those of `bulk` requests or of interactive ones."""
        self._pass(seconds)
        if bulk:
            beyond_s = max(0.0, seconds - READ_S)
            self._owed_s = min(MOST_OWED_S, beyond_s * (1 - READ_SHARE) / READ_SHARE)
            self._unread_s = 0.0

    def _pass(self, seconds: float) -> None:
        self._owed_s = max(0.0, self._owed_s - seconds)
        self._unread_s += seconds

"""Which bulk work takes part in a step that readers wait for. Pure.

A step with all rows of a large bulk load in it, and prompts, may take ten times as long as one for the streams alone,
and each is a gap in every stream. But rows are cheapest in numbers. So as many decode beside the streams as a step has
time for: those beside the streams' slots, which llama.cpp computes in the same pass, and now and then others, in turns.
Bulk prompts are read in a share of the time. Where rows cost little, on a GPU, all take part.
"""

from __future__ import annotations

from collections.abc import Collection

from .neighbours import by_nearness

FLUENT_S = 0.035  # a step's decode call may take so long: with all that is beside it, gaps of 40 ms
STRETCH = 1.2  # or, where that is more, so many times as long as one for the streams alone
FAR_EVERY = 4  # steps: then rows have their turn that lie elsewhere …
FAR_STRETCH = 1.25  # … in a pass of their own, for which the step may take so many times as long
FIRST_ROWS = 8
FEWER = 0.8  # of the rows, after a step that took too long; one more after one that did not
READ_S = 0.1  # a step in which bulk prompts are read may take so long at any time
READ_SHARE = 0.2  # of the time, for what such steps take beyond that
MOST_OWED_S = 2.0
OVERDUE_S = 2.0  # without a bulk prompt read: then one that is older than the interactive ones goes first
STILL_SHARE = 0.05  # of the time, for steps in which no bulk row decodes
MOST_GIVEN_S = 0.5
WEIGHT = 0.2  # of a new value in a running mean


class _Rows:
    """How many rows a step has time for, found by trying."""

    def __init__(self) -> None:
        self.most = FIRST_ROWS

    def observe(self, *, too_long: bool, num_useful: int) -> None:
        """A step with so many rows was too long, or not; more than `num_useful` are of no use."""
        self.most = int(self.most * FEWER) if too_long else self.most + 1
        self.most = min(self.most, max(FIRST_ROWS, num_useful))


class Courtesy:
    """How much time bulk work still gives up for interactive requests: a share of all, of which some is saved up."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seconds = MOST_GIVEN_S

    @property
    def is_left(self) -> bool:
        return self._seconds > 0

    def give(self, seconds: float) -> None:
        """So much of bulk work was done for nothing, or stood still."""
        self._seconds -= seconds

    def observe(self, seconds: float) -> None:
        """So much time went by."""
        self._seconds = min(MOST_GIVEN_S, self._seconds + self._share * seconds)


class BulkTurns:
    """How many bulk rows decode beside streams, which ones, and when bulk prompts are read there."""

    def __init__(self) -> None:
        self._near, self._far = _Rows(), _Rows()
        self._is_far = False  # the step that was built last
        self._num_steps = 0  # since others than the nearest had their turn
        self._last_slot = -1  # of the rows that had it
        self._num_rows = 0  # of the step that was built last …
        self._num_bulk = 0  # … out of so many
        self._alone_s = 0.0  # that a step for streams alone takes, in the mean
        self._owed_s = 0.0  # of steps in which no bulk prompt is read
        self._unread_s = 0.0  # of steps since one was
        self._courtesy = Courtesy(STILL_SHARE)

    def observe(self, seconds: float) -> None:
        """So much time went by in steps of any kind."""
        self._courtesy.observe(seconds)

    @property
    def may_stand_still(self) -> bool:
        """True if bulk rows may miss a step that reads interactive prompts: they would be a pass of their own."""
        return self._courtesy.is_left

    def observe_still(self, seconds: float) -> None:
        """A step in which they stood still took so long."""
        self._courtesy.give(seconds)
        self.observe_read(seconds, bulk=False)

    def rows(self, bulk: Collection[int], streams: Collection[int] = ()) -> list[int]:
        """The slots of those that decode in the next step beside these streams."""
        near = by_nearness(bulk, streams)[: self._near.most]
        self._num_steps += 1
        self._is_far = len(near) < len(bulk) and self._num_steps >= FAR_EVERY
        chosen = self._next_far(set(bulk).difference(near)) if self._is_far else near
        self._num_rows, self._num_bulk = len(chosen), len(bulk)
        return chosen

    def _next_far(self, far: Collection[int]) -> list[int]:
        """Neighbours, which have waited longest."""
        chosen = sorted(far, key=lambda slot: (slot <= self._last_slot, slot))[: max(1, self._far.most)]
        self._last_slot, self._num_steps = chosen[-1], 0
        return chosen

    def may_read(self, *, before_interactive: bool = False) -> bool:
        """True if it is the turn of bulk prompts, also of those that are older than interactive ones."""
        return self._owed_s <= 0 and (not before_interactive or self._unread_s > OVERDUE_S)

    def observe_decode(self, seconds: float) -> None:
        """A step that decoded these rows beside streams, and read nothing, took so long."""
        self._pass(seconds)
        if not self._num_rows:
            self._alone_s += (seconds - self._alone_s) * (WEIGHT if self._alone_s else 1.0)
        most_s = max(FLUENT_S, STRETCH * self._alone_s) * (FAR_STRETCH if self._is_far else 1.0)
        rows = self._far if self._is_far else self._near
        rows.observe(too_long=seconds > most_s, num_useful=self._num_bulk)

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

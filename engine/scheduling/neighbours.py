"""Which slots should lie side by side: filling holes between them, and moving them together. Pure.

`cost` is a table: seconds of a pass by its number of rows. Slots are given in order.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from itertools import pairwise
from typing import NamedTuple


class SlotRun(NamedTuple):
    """Slots with consecutive indices."""

    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size


class Cover(NamedTuple):
    """A choice of holes to fill."""

    seconds: float  # of a decode call with it
    holes: list[int]  # slots that are filled


def runs_of(slots: Seq[int]) -> list[SlotRun]:
    """Return the runs of slots, which are in order."""
    runs: list[SlotRun] = []
    for slot in slots:
        if runs and runs[-1].end == slot:
            runs[-1] = SlotRun(runs[-1].first, runs[-1].size + 1)
        else:
            runs.append(SlotRun(slot, 1))
    return runs


def cheapest_cover(slots: Seq[int], can_fill: Callable[[int], bool], cost: Seq[float]) -> Cover:
    """Return the holes between these slots, which are in order, whose rows cost less than the passes that they save.

    Exact: the best way to cover the first runs is the best way to cover fewer of them, and a pass over the others.
    """
    runs = runs_of(slots)
    bridgeable = [all(can_fill(slot) for slot in range(before.end, after.first)) for before, after in pairwise(runs)]
    best, since = [0.0], [0]  # of the first runs: seconds, and the first run of the last pass
    for last, run in enumerate(runs):
        seconds, start = best[last] + cost[run.size], last
        for first in range(last - 1, -1, -1):
            if not bridgeable[first]:
                break
            candidate = best[first] + cost[run.end - runs[first].first]
            if candidate < seconds:
                seconds, start = candidate, first
        best.append(seconds)
        since.append(start)
    return Cover(best[-1], _holes(runs, since))


def _holes(runs: Seq[SlotRun], since: Seq[int]) -> list[int]:
    holes: list[int] = []
    last = len(runs)
    while last > 0:
        first = since[last]
        for before, after in pairwise(runs[first:last]):
            holes += range(before.end, after.first)
        last = first
    return sorted(holes)


def moves_together(own: Seq[int], idle: Seq[int], weight: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return moves (from, to) of `own` slots to idle ones after which they lie in as few runs as possible.

    A window of as many places as there are own slots slides over the places, which are own and idle slots in order.
    The best window has the fewest breaks, where a slot of others lies between two places, and of these windows the one
    in which least has to move, by the `weight` of each slot. Own slots outside of it move to idle ones in it.

    With own 0 and 3, idle 1, 2 and 5, and 4 of others, places are 0 1 2 3 5. No window of two but (3, 5) has a break.
    If slot 3 weighs most, the best of the others is (2, 3), and the only move is (0, 2).
    """
    places, mine, count = sorted([*own, *idle]), set(own), len(own)
    breaks = [0] + [int(after != before + 1) for before, after in pairwise(places)]
    worth = [weight[slot] if slot in mine else -weight[slot] for slot in places]
    num_breaks, kept = sum(breaks[1:count]), sum(worth[:count])
    best, start = (num_breaks, -kept), 0
    for first in range(1, len(places) - count + 1):
        num_breaks += breaks[first + count - 1] - breaks[first]
        kept += worth[first + count - 1] - worth[first - 1]
        if (num_breaks, -kept) < best:
            best, start = (num_breaks, -kept), first
    window = set(places[start : start + count])
    return list(zip(sorted(mine - window, reverse=True), sorted(window - mine), strict=True))


def beside(running: Seq[int], empty: Seq[int]) -> int | None:
    """Return the empty slot for one more sequence next to running ones: in a hole if there is one."""
    return next(iter(by_nearness(empty, running)), None)


def by_nearness(slots: Iterable[int], running: Iterable[int]) -> list[int]:
    """Return slots in the order in which they suit running ones: holes first, then neighbours, then by distance."""
    others = sorted(running)

    def distances(slot: int) -> tuple[int, int, int]:
        at = bisect(others, slot)
        near = [abs(other - slot) for other in others[max(0, at - 1) : at + 1]]
        return -near.count(1), min(near, default=0), slot

    return sorted(slots, key=distances)

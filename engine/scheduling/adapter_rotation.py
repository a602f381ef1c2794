"""Whose turn it is when running sequences use different adapter sets: a decode call serves one set. Pure.

A turn lasts for a slice of time, because changing the set costs llama.cpp a new graph (docs/adr/004-adapters.md). Then
comes the group that has waited longest, where one with bulk requests only counts as if it had begun to wait later.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

SLICE_S = 0.1
BULK_SLICE_S = 0.5  # when no reader waits for each token
BULK_EXTRA_S = 0.3  # a group with bulk requests only waits so much longer


@dataclass(slots=True)
class _Group:
    num: int  # sequences
    num_interactive: int
    waits_since: float  # for its turn

    @property
    def due(self) -> float:
        return self.waits_since if self.num_interactive else self.waits_since + BULK_EXTRA_S


class Rotation:
    """Groups of running sequences by what they have in common; idle while there is one group only."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, _Group] = {}
        self._turn: Hashable = None
        self._since = -math.inf  # when the turn began

    def add(self, key: Hashable, interactive: bool, now: float) -> None:
        """One more sequence of this group has a slot."""
        group = self._groups.get(key)
        if group is None:
            self._end_of_being_alone(now)
            group = self._groups[key] = _Group(0, 0, now)
        group.num += 1
        group.num_interactive += interactive

    def _end_of_being_alone(self, now: float) -> None:
        """A single group has had its turn until now: the one that comes is next."""
        if len(self._groups) == 1:
            self._turn, self._since = next(iter(self._groups)), -math.inf

    def remove(self, key: Hashable, interactive: bool) -> None:
        """A sequence of this group has lost its slot, or ended."""
        group = self._groups[key]
        group.num -= 1
        group.num_interactive -= interactive
        if not group.num:
            del self._groups[key]

    @property
    def is_needed(self) -> bool:
        """True while there is more than one group."""
        return len(self._groups) > 1

    def is_needed_with(self, key: Hashable) -> bool:
        """True if there will be more than one group with this one."""
        return len(self._groups.keys() | {key}) > 1

    def turn(self, now: float) -> Hashable:
        """The group that the next step serves. Only while there is one."""
        current = self._groups.get(self._turn)
        if current is not None:
            if now < self._since + self._slice_s():
                return self._turn
            current.waits_since = now
        last = self._turn
        self._turn = min(self._groups, key=lambda key: (self._groups[key].due, key == last))
        self._since = now
        return self._turn

    def _slice_s(self) -> float:
        return SLICE_S if any(group.num_interactive for group in self._groups.values()) else BULK_SLICE_S


def slot_beside(key: Hashable, holders: Sequence[Hashable | None]) -> int | None:
    """The idle slot that suits a group best: next to its own, else in the middle of a gap, so that it can grow.

    `holders` has the group of each slot, None where it is idle. With a stream of cells per slot llama.cpp decodes slots
    that are not neighbours in one pass each (llama-batch.cpp: split_equal).
    """
    gaps = [list(gap) for is_idle, gap in groupby(range(len(holders)), lambda slot: holders[slot] is None) if is_idle]
    for gap in sorted(gaps, key=len, reverse=True):
        first, last = gap[0], gap[-1]
        if first > 0 and holders[first - 1] == key:
            return first
        if last + 1 < len(holders) and holders[last + 1] == key:
            return last
    widest = max(gaps, key=len, default=[])
    return widest[len(widest) // 2] if widest else None

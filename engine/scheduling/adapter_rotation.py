"""Which adapter set the next step serves when running sequences use several: a decode call serves one set. Pure.

A turn lasts for a slice of time, because changing the set costs llama.cpp a new graph (docs/adr/004-adapters.md). The
next turn is for the group that has waited longest. A group with bulk requests only counts as if it had started to wait
BULK_EXTRA_S later.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

SLICE_S = 0.1  # of a turn: a switch costs 4 to 9 % of it, and each other group waits so long
BULK_SLICE_S = 0.5  # of a turn while only bulk requests have slots: nobody reads along, and a switch costs 1 to 2 %
BULK_EXTRA_S = 0.3  # that a group with bulk requests only waits longer: as long as a bulk step may take


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
        """Add a sequence that has got a slot to its group."""
        group = self._groups.get(key)
        if group is None:
            self._end_of_being_alone(now)
            group = self._groups[key] = _Group(0, 0, now)
        group.num += 1
        group.num_interactive += interactive

    def _end_of_being_alone(self, now: float) -> None:
        """Let the group that arrives be next, because the single one before had its turn until now."""
        if len(self._groups) == 1:
            self._turn, self._since = next(iter(self._groups)), -math.inf

    def remove(self, key: Hashable, interactive: bool) -> None:
        """Remove a sequence that has lost its slot or ended from its group."""
        group = self._groups[key]
        group.num -= 1
        group.num_interactive -= interactive
        if not group.num:
            del self._groups[key]

    @property
    def is_needed(self) -> bool:
        """True while there is more than one group."""
        return len(self._groups) > 1

    def take_turn(self, now: float) -> Hashable:
        """Return the group that the next step serves. There must be one."""
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

"""Where a waiting sequence can go: which slot, with which prefix, and whether there are cells for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cellama.engine.kvcache.manager import KvCache, Plan

from .adapter_rotation import Rotation, place_for
from .sequence import Sequence, State

WORTH_WAITING_TOKENS = 64  # a prefix shorter than this is computed twice rather than waited for
GROWTH_TOKENS = 16  # cells kept free for each running sequence when a new one is admitted


class Placement:
    """Looks at the slots, which are the scheduler's, and changes nothing but idle cells that it has emptied."""

    def __init__(self, cache: KvCache, slots: Seq[Sequence | None], rotation: Rotation) -> None:
        """`slots` is the scheduler's own list: it has the sequence of each slot at any time."""
        self._cache = cache
        self._slots = slots
        self._rotation = rotation

    def prefix_is_coming(self, sequence: Sequence) -> bool:
        """True while another slot computes a prefix that this sequence could take over a moment later."""
        if sequence.waits_for is not None and _will_compute(*sequence.waits_for):
            return True
        sequence.waits_for = None
        if None not in self._slots:
            return False  # it can't have a slot now, or only somebody's who is less urgent: no reason to search
        ready = max((n for _, n in self._cache.longest(sequence.tokens, sequence.scope)), default=0)
        for slot, length in self._cache.soon(sequence.tokens, sequence.scope):
            holder = self._slots[slot]
            if length < ready + WORTH_WAITING_TOKENS:
                break  # the longest come first
            if holder is not None and _will_compute(holder, length) and self._can_be_taken(holder, length):
                sequence.waits_for = (holder, length)
                return True
        return False

    def _can_be_taken(self, holder: Sequence, length: int) -> bool:
        """True if the first tokens of a slot can be taken over once they are computed, or all that it has then."""
        return self._cache.memory.partial_reuse or length == len(holder.tokens)

    def find(self, sequence: Sequence, idle: list[int]) -> Plan | None:
        """Where the sequence goes with the cells that it needs, for which idle slots may be emptied."""
        plan = self._cache.plan(sequence.tokens, sequence.scope, idle, self._place_for(sequence))
        wanted = self._cells_wanted(sequence)
        others = [slot for slot in idle if slot not in (plan.slot, plan.source)]
        if self._cache.reclaim(others, self._cache.missing_cells(plan, wanted)):
            return plan
        anew = Plan(plan.slot, None, 0)
        if self._cache.reclaim(idle, wanted - self._cache.cells.free):
            return anew
        # Nobody runs, so a prompt that `check` let pass fits; what is kept for growth is not needed.
        return anew if len(idle) == len(self._slots) and self._cache.reclaim(idle, len(sequence.tokens)) else None

    def would_fit(self, sequence: Sequence, idle: list[int], victims: list[Sequence]) -> bool:
        """True if there are cells enough once all victims have lost their slots."""
        slots = idle + [victim.slot for victim in victims if victim.slot is not None]
        cells = self._cache.cells
        return self._cells_wanted(sequence, victims) <= cells.free + cells.freed_by(slots)

    def _place_for(self, sequence: Sequence) -> int | None:
        """The slot beside others with the same adapters; any will do while all have the same."""
        if self._cache.memory.unified or not self._rotation.is_needed_with(sequence.adapters):
            return None
        return place_for(sequence.adapters, [None if s is None else s.adapters for s in self._slots])

    def _cells_wanted(self, sequence: Sequence, victims: Seq[Sequence] = ()) -> int:
        """Cells that have to be free for the sequence, and for what runs beside it without the victims."""
        if not self._cache.memory.unified:
            return 0  # each slot has its own
        others = [holder for holder in self._slots if holder is not None and holder not in victims]
        return len(sequence.tokens) + 1 + sum(GROWTH_TOKENS + other.num_pending for other in others)


def _will_compute(sequence: Sequence, length: int) -> bool:
    return sequence.state is State.PREFILLING and sequence.num_computed < length

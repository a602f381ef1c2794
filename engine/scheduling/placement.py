"""Which slot a waiting sequence gets, with which prefix and cells, and which running sequences give way to it. Pure.

Interactive sequences are kept together, so that llama.cpp decodes them in one pass (docs/adr/011).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cellama.engine.kvcache.disk_tier import DiskTier
from cellama.engine.kvcache.manager import KvCache, Placement

from .bulk_policy import gives_way_though_older
from .neighbours import beside, by_nearness
from .sequence import Sequence, State
from .slots import SlotTable
from .waiting_queue import rank_if_preempted

WORTH_WAITING_TOKENS = 64  # of a shared prefix that another slot computes: fewer are computed twice, in one pass
GROWTH_TOKENS = 16  # cells of a pool that each running sequence keeps when another one is admitted: some 16 steps


class SlotFinder:
    """Finds slots, for which it may empty idle ones, and prefixes that are worth waiting for."""

    def __init__(self, cache: KvCache, slots: SlotTable) -> None:
        self._cache = cache
        self._slots = slots
        self.disk: DiskTier | None = None

    def await_prefix(self, sequence: Sequence, now: float) -> bool:
        """Return whether the sequence waits, for a prefix that a slot computes or that is read from a file.

        Reading starts here if there is a file with a longer prefix than slots and RAM have.
        """
        if sequence.waits_for is not None and _will_compute(*sequence.waits_for):
            return True
        sequence.waits_for = None
        if self._await_file(sequence, now):
            return True
        if None not in self._slots:
            return False  # it can't have a slot now, or only that of a less urgent one: no reason to search
        ready = self._cache.longest_prefix(sequence.tokens, sequence.scope)
        for slot, length in self._cache.prefixes_in_progress(sequence.tokens, sequence.scope):
            holder = self._slots[slot]
            if length < ready + WORTH_WAITING_TOKENS:
                break  # the longest come first
            coming = 0 if holder is None else self._num_coming(holder, length)
            if holder is not None and coming >= ready + WORTH_WAITING_TOKENS and _will_compute(holder, coming):
                sequence.waits_for = (holder, coming)
                return True
        return False

    def _await_file(self, sequence: Sequence, now: float) -> bool:
        match, sequence.match = sequence.match, None
        if match is not None and self.disk is not None:
            ready = self._cache.longest_prefix(sequence.tokens, sequence.scope)
            sequence.file_wait = self.disk.begin(match, sequence.scope, len(sequence.tokens) - 1, ready, now)
        return sequence.file_wait is not None and sequence.file_wait.continues(now)

    def _num_coming(self, holder: Sequence, shared: int) -> int:
        """Return how many of the shared tokens can be taken over from a slot once they are computed."""
        if self._cache.memory.partial_reuse or shared == len(holder.tokens):
            return shared
        return max((cut for cut in holder.cuts if cut <= shared), default=0)

    def find_slot(self, sequence: Sequence, idle: list[int]) -> Placement | None:
        """Return where the sequence goes with the cells that it needs, for which idle slots may be emptied."""
        placement = self._cache.find_slot(sequence.tokens, sequence.scope, idle, self._preferred_slot(sequence, idle))
        needed = self._cells_needed(sequence)
        others = [slot for slot in idle if slot not in (placement.slot, placement.source)]
        if self._cache.reclaim(others, self._cache.missing_cells(placement, needed)):
            return placement
        anew = Placement(placement.slot, None, 0)
        if self._cache.reclaim(idle, needed - self._cache.cells.free):
            return anew
        # No sequence runs, so a prompt that `check` let pass fits; what is kept for growth is not needed.
        return anew if len(idle) == len(self._slots) and self._cache.reclaim(idle, len(sequence.tokens)) else None

    def would_fit(self, sequence: Sequence, idle: list[int], victims: list[Sequence]) -> bool:
        """Return whether there are cells enough once all victims have lost their slots."""
        slots = idle + [victim.slot for victim in victims if victim.slot is not None]
        cells = self._cache.cells
        return self._cells_needed(sequence, victims) <= cells.free + cells.freed_by(slots)

    def _preferred_slot(self, sequence: Sequence, idle: list[int]) -> int | None:
        """Return an empty slot next to those that are decoded together with this sequence, else next to any others."""
        if self._cache.memory.unified:
            return None
        neighbours = self._slots_like(sequence) or self._slots.busy
        return beside(neighbours, [slot for slot in idle if not self._cache.cells.of(slot)])

    def _slots_like(self, sequence: Sequence) -> list[int]:
        """Return the slots of sequences like this one, which may be decoded in one pass: interactive or bulk."""
        kind = sequence.request.is_interactive, sequence.adapters
        return [slot for slot, s in enumerate(self._slots) if s and (s.request.is_interactive, s.adapters) == kind]

    def victims(self, sequence: Sequence, now: float) -> list[Sequence]:
        """Return the running sequences that should rather wait than this one, the first to lose its slot first.

        The order of the queue decides, in which only time spent waiting makes a sequence older. An older bulk request
        also gives way to an interactive one, but not again at once, so it makes progress.
        """
        less_urgent = [s for s in self._slots.running if s.request.priority > sequence.request.priority]
        ranks = {s: rank_if_preempted(s, now) for s in less_urgent}
        younger = [s for s in less_urgent if ranks[s] > sequence.rank]
        older = [s for s in less_urgent if ranks[s] <= sequence.rank and gives_way_though_older(s, sequence, now)]
        older.sort(key=lambda s: ranks[s], reverse=True)
        return self._cheapest_first(younger, sequence) + older

    def _cheapest_first(self, victims: list[Sequence], sequence: Sequence) -> list[Sequence]:
        """Return the least urgent first; of these the youngest or, where states are saved, the nearest."""
        if self._cache.memory.unified or not self._cache.ram.quota_bytes or not sequence.request.is_interactive:
            return sorted(victims, key=expendable, reverse=True)
        slots = [victim.slot for victim in victims if victim.slot is not None]
        order = {slot: index for index, slot in enumerate(by_nearness(slots, self._slots_like(sequence)))}
        return sorted(victims, key=lambda victim: (-victim.request.priority, order[victim.slot or 0]))

    def _cells_needed(self, sequence: Sequence, victims: Seq[Sequence] = ()) -> int:
        """Return the cells that the sequence needs, and the running ones without the victims."""
        if not self._cache.memory.unified:
            return 0  # each slot has its own
        gone = frozenset(victims)
        others = [holder for holder in self._slots.running if holder not in gone]
        return len(sequence.tokens) + 1 + sum(GROWTH_TOKENS + other.num_pending for other in others)


def _will_compute(sequence: Sequence, length: int) -> bool:
    return sequence.state is State.PREFILLING and sequence.num_computed < length


def expendable(sequence: Sequence) -> tuple[int, float, int]:
    """Return a key that is larger for what should rather give up its slot: the less urgent, then the younger."""
    return sequence.request.priority, sequence.admitted_at or 0.0, sequence.order

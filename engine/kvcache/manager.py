"""Which tokens lie in which slot, what a new sequence can take over, and what is kept in RAM.

A slot's cells outlive its sequence: they wait there for a sequence that begins alike, until they are
needed. Then they move to RAM (ram_tier.py), if they are worth it. Every change of the device's cells goes through
this class. Engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from cellama.engine.backend import KvMemory
from cellama.engine.events import CacheTier

from .cells import Cells
from .checkpoints import Checkpoints
from .prefix import PrefixIndex, Tokens
from .ram_tier import Note, RamTier, SavedState, Source
from .slot_swaps import SlotSwaps
from .sources import Sources

log = logging.getLogger(__name__)

WORTH_SAVING_TOKENS = 64  # fewer are faster computed again than kept


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence goes, and the first tokens that it takes over from `source`."""

    slot: int
    source: Source | None
    num_tokens: int

    @property
    def tier(self) -> CacheTier:
        """Where its prefix is, if it has one."""
        return self.source.tier if isinstance(self.source, SavedState) else "device"


@dataclass(slots=True)
class CacheCounters:
    """What the cache did since the start."""

    hits_slot: int = 0  # continued where it was
    hits_copy: int = 0  # from another slot
    hits_ram: int = 0
    hits_disk: int = 0  # read from the folder for it
    misses: int = 0


class KvCache:
    """The states of all slots and of RAM, and how a sequence comes by its prefix."""

    def __init__(
        self, memory: KvMemory, ram_bytes: int = 0, demanded_prefix: Callable[[Tokens, Hashable], int] | None = None
    ) -> None:
        """`ram_bytes` is the quota of saved states and checkpoints; 0 saves nothing.

        `demanded_prefix` says with how many of these tokens a waiting sequence begins.
        """
        self.memory = memory
        self.cells = Cells(memory.n_slots, memory.n_cells, shared=memory.unified)
        self.counters = CacheCounters()
        self._demanded_prefix = demanded_prefix or (lambda tokens, scope: 0)
        self._index: PrefixIndex[int] = PrefixIndex()
        self.checkpoints = Checkpoints(memory, 0 if memory.partial_reuse else ram_bytes // 2)
        self.ram = RamTier(memory, ram_bytes - self.checkpoints.quota_bytes, self.checkpoints)
        self.sources = Sources(memory, self.cells, self._index, self.ram, self.checkpoints)
        self._scopes: dict[int, Hashable] = {}  # of slots that have an entry in the index
        self._unsaved: dict[int, None] = {}  # idle slots worth saving, longest idle first
        self._last_used = [0] * memory.n_slots
        self.swaps = SlotSwaps(
            memory, self.cells, self._index, self.checkpoints, (self._scopes, self._unsaved, self._last_used)
        )
        self._clock = 0

    # Finding a slot

    def find_slot(
        self, tokens: Sequence[int], scope: Hashable, idle: Sequence[int], preferred: int | None = None
    ) -> Placement:
        """The cheapest of the `idle` slots for a sequence, the `preferred` one if no prefix decides."""
        best = self.sources.best(tokens, scope, idle)
        if best is None:
            return Placement(self._cheapest(idle, preferred), None, 0)
        source, count = best
        if isinstance(source, int) and source in idle and self._may_overwrite(source, count, idle):
            return Placement(source, source, count)
        others = [slot for slot in idle if slot != source]
        return Placement(self._cheapest(others, preferred), source, count) if others else Placement(idle[0], None, 0)

    def _may_overwrite(self, slot: int, count: int, idle: Sequence[int]) -> bool:
        """True if continuing in the slot loses less than it takes over, or there is no other slot."""
        return len(idle) == 1 or self.cells.of(slot) - count <= count

    def _cheapest(self, idle: Sequence[int], preferred: int | None) -> int:
        """The preferred slot; an empty one, lowest index first (llama.cpp likes dense ids); else the longest idle.

        What a waiting sequence begins with goes last.
        """
        order = sorted(idle, key=lambda slot: (slot != preferred, self.cells.of(slot) > 0, self._last_used[slot], slot))
        return next((slot for slot in order if not self._is_demanded(slot)), order[0])

    def _is_demanded(self, slot: int) -> bool:
        """True if a sequence waits for a prefix that only this slot has."""
        if slot not in self._index:
            return False
        tokens, scope = self._index.tokens_of(slot), self._scopes[slot]
        length = self.sources.usable(slot, self._demanded_prefix(tokens, scope))
        if length < WORTH_SAVING_TOKENS or self.cells.of(slot) < len(tokens):  # a running one
            return False
        return not self.sources.has_another(slot, tokens, scope, length)

    def missing_cells(self, placement: Placement, num_tokens: int) -> int:
        """Cells that `num_tokens` positions would need beyond those that are free once the placement is carried out."""
        source = placement.source
        if isinstance(source, SavedState):
            num_tokens = max(num_tokens, source.num_tokens)  # it comes back whole before it is cut
        stays = source is not None and (source == placement.slot or self.sources.shares_cells(source))
        saved_by_sharing = placement.num_tokens if stays else 0
        freed = 0 if source == placement.slot else self.cells.own(placement.slot)
        return num_tokens - saved_by_sharing - self.cells.free - freed

    # Assigning a slot

    def assign_slot(self, placement: Placement, tokens: Sequence[int], scope: Hashable) -> int:
        """Carries a placement out for a sequence of these tokens; returns how many of them its slot holds now."""
        if placement.source is not None and placement.source == placement.slot:
            count = self._continue_in(placement.slot, placement.num_tokens)
        else:
            if isinstance(placement.source, SavedState):
                self.ram.touch(placement.source)  # what is saved now should not push it out
            self.clear(placement.slot)
            count = self._load_prefix(placement)
        self.counters.misses += count == 0
        self._index_slot(placement.slot, tokens, scope)
        return count

    def _continue_in(self, slot: int, count: int) -> int:
        if self.cells.of(slot) - count >= WORTH_SAVING_TOKENS:
            self.save_unsaved(slot)
        self._unsaved.pop(slot, None)
        kept = self.truncate(slot, count)
        self.counters.hits_slot += kept > 0
        return kept

    def _load_prefix(self, placement: Placement) -> int:
        """Fills the empty slot of a placement; what can't be taken over is computed, so nothing is lost but time."""
        try:
            return self._restore(placement) if isinstance(placement.source, SavedState) else self._copy(placement)
        except Exception:  # no memory for the buffers, for instance
            log.exception("a state could not be taken over; it is computed again")
            self.wipe(placement.slot)
            return 0

    def _restore(self, placement: Placement) -> int:
        source, slot, count = placement.source, placement.slot, placement.num_tokens
        assert isinstance(source, SavedState)
        if self.memory.unified and source.num_tokens > self.cells.free:
            return 0  # it has no free cells just now
        if not self.memory.restore(slot, source.data, count, self.sources.checkpoint_for(source, count)):
            self.ram.forget(source)  # a damaged state is a miss, never a wrong text
            return 0
        self.cells.extend(slot, count)
        self.checkpoints.inherit(slot, source, count)
        self.counters.hits_ram += source.tier == "ram"
        self.counters.hits_disk += source.tier == "disk"
        source.tier = "ram"
        return count

    def _copy(self, placement: Placement) -> int:
        source, slot, count = placement.source, placement.slot, placement.num_tokens
        if source is None or isinstance(source, SavedState):
            return 0
        if not self.memory.copy(source, slot, count, self.sources.checkpoint_for(source, count)):
            return 0
        self._copy_cells(source, slot, count)
        self.checkpoints.inherit(slot, source, count)
        self.counters.hits_copy += 1
        self._touch(source)
        return count

    def _copy_cells(self, source: int, slot: int, count: int) -> None:
        if self.sources.shares_cells(source):
            self.cells.copy(source, slot, count)
        else:
            self.cells.extend(slot, count)

    def _index_slot(self, slot: int, tokens: Sequence[int], scope: Hashable) -> None:
        self._index.insert(slot, tokens, scope)
        self._scopes[slot] = scope
        self._touch(slot)

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._last_used[slot] = self._clock

    def extend(self, slot: int, count: int) -> None:
        """Accounts `count` positions that were computed."""
        self.cells.extend(slot, count)

    def take_checkpoint(self, slot: int) -> None:
        """What the slot holds now can be taken over by others later, as far as the quota goes."""
        self.checkpoints.take(slot, self.cells.of(slot))

    def truncate(self, slot: int, count: int) -> int:
        """Keeps the first positions of a slot, or as many of them as it can be cut back to; returns how many."""
        first_cut = self.memory.first_cut(slot)
        kept = count if count >= first_cut else self.checkpoints.longest(slot, count)
        checkpoint = None if kept >= first_cut else self.checkpoints.at(slot, kept)
        if not self.memory.trim(slot, kept, checkpoint):
            kept = 0
        self.cells.trim(slot, kept)
        self.checkpoints.cut(slot, kept)
        return kept

    def branches(self, tokens: Sequence[int], scope: Hashable) -> list[int]:
        """The lengths at which what is or was here parts from these tokens, or ends."""
        return self._index.branches(tokens, scope) + self.ram.branches(tokens, scope)

    def retire(
        self, slot: int, tokens: Sequence[int], scope: Hashable, *, save: bool, note: Note | None = None
    ) -> None:
        """The sequence of a slot has ended; its cells, which hold `tokens`, wait for another one."""
        self._index_slot(slot, tokens, scope)
        if note is not None:
            self.ram.notes[slot] = note
        if save and self.ram.quota_bytes and len(tokens) >= WORTH_SAVING_TOKENS:
            self._unsaved[slot] = None

    def clear(self, slot: int) -> None:
        """Empties a slot, after saving what is worth it."""
        if self.ram.quota_bytes and self._is_demanded(slot):
            self._unsaved[slot] = None
        self.save_unsaved(slot)
        self._index.remove(slot)
        self._scopes.pop(slot, None)
        self.truncate(slot, 0)

    def wipe(self, slot: int) -> None:
        """Empties a slot whose contents are unknown."""
        self._unsaved.pop(slot, None)
        self._index.remove(slot)
        self._scopes.pop(slot, None)
        self.truncate(slot, 0)

    def reclaim(self, idle: Iterable[int], missing: int) -> bool:
        """Empties idle slots until `missing` cells are free; False, and nothing is emptied, if they don't have so many.

        Those without a demanded prefix go first, and of them the longest unused.
        """
        slots = sorted(idle, key=lambda slot: (self._is_demanded(slot), self._last_used[slot])) if missing > 0 else []
        if missing > self.cells.freed_by(slots):
            return False
        needed = self.cells.free + missing
        for slot in slots:
            if self.cells.free >= needed:
                break
            self.clear(slot)
        return True

    # RAM

    def save(self, slot: int, tokens: Sequence[int], scope: Hashable) -> None:
        """Keeps a copy of a slot's cells, which hold `tokens`, as far as the quota goes."""
        self._unsaved.pop(slot, None)
        if self.ram.quota_bytes and len(tokens) >= WORTH_SAVING_TOKENS:
            self.ram.save(slot, tokens, scope)

    def save_unsaved(self, slot: int) -> None:
        """Saves an idle slot, if it is worth it and not saved yet."""
        if slot in self._unsaved:
            self.save(slot, self._index.tokens_of(slot), self._scopes[slot])

    def save_one_idle(self) -> bool:
        """Saves the slot that has waited for it longest; False when none waits. For times without a step."""
        slot = next(iter(self._unsaved), None)
        if slot is None:
            return False
        self.save_unsaved(slot)
        return True

    def held_by(self, slot: int) -> tuple[Tokens, Hashable] | None:
        """What an idle slot holds, and its scope. Any thread: it may be a moment behind."""
        try:
            return self._index.tokens_of(slot), self._scopes[slot]
        except KeyError:
            return None

    def unsaved(self) -> list[int]:
        """Idle slots that are worth saving, and are not saved yet."""
        return list(self._unsaved)

    def forget_scope(self, scope: Hashable) -> None:
        """Drops the saved states of a scope that will not be asked for again."""
        self.ram.forget_scope(scope)

"""Which tokens lie in which slot, what a new sequence can take over, and what is kept in RAM.

A slot keeps its cells when its sequence ends, for a later sequence with the same prefix. When the slot is needed, the
cells move to RAM (ram_tier.py) if they are worth it. Every change of the device's cells goes through this class.
Only the engine thread uses it, except for `probe`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cellama.engine.backend import KvMemory
from cellama.engine.events import CacheTier

from .cells import Cells
from .checkpoints import Checkpoints
from .prefix import PrefixIndex, Tokens, common_length
from .ram_tier import RamTier, SavedState, Source, StateNote

log = logging.getLogger(__name__)

WORTH_SAVING_TOKENS = 64  # computing fewer again is faster than copying them to RAM and back
# What moving a state costs, in tokens of prefill that could be computed meanwhile (ADR 003): a constant part, and one
# token for each so many that are moved. By model and length that is between 20 and 80.
MOVE_COST_TOKENS = 16
MOVED_PER_TOKEN = 32

SlotContents = tuple[Sequence[int], Hashable]  # the tokens that are computed in a slot, and their scope


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence goes, and how many first tokens it takes over from `source`."""

    slot: int
    source: Source | None
    num_tokens: int

    @property
    def tier(self) -> CacheTier:
        """The tier of its prefix, if it has one."""
        return self.source.tier if isinstance(self.source, SavedState) else "device"


@dataclass(slots=True)
class CacheCounters:
    """What the cache did since the start."""

    hits_slot: int = 0  # continued where it was
    hits_copy: int = 0  # from another slot
    hits_ram: int = 0
    hits_disk: int = 0  # read from the folder for it
    misses: int = 0


@dataclass(slots=True)
class _SlotRecord:
    """What is known of a slot beside its cells, its tokens and its checkpoints."""

    last_used: int = 0  # on the cache's own clock
    is_unsaved: bool = False  # it is idle, worth saving, and not saved yet
    note: StateNote | None = None  # from the sequence that ended there


class KvCache:
    """The states of all slots and of RAM, and how a sequence comes by its prefix."""

    def __init__(
        self, memory: KvMemory, ram_bytes: int = 0, demanded_prefix: Callable[[Tokens, Hashable], int] | None = None
    ) -> None:
        """`ram_bytes` is the quota of saved states and checkpoints; 0 saves nothing.

        `demanded_prefix` returns with how many of these tokens a waiting sequence begins.
        """
        self.memory = memory
        self.cells = Cells(memory.n_slots, memory.n_cells, shared=memory.unified)
        self.counters = CacheCounters()
        self._demanded_prefix = demanded_prefix or (lambda tokens, scope: 0)
        self._index: PrefixIndex[int] = PrefixIndex()
        self.checkpoints = Checkpoints(memory, 0 if memory.partial_reuse else ram_bytes // 2)
        self.ram = RamTier(memory, ram_bytes - self.checkpoints.quota_bytes, self.checkpoints)
        self._records = [_SlotRecord() for _ in range(memory.n_slots)]
        self._clock = 0

    # Finding a prefix. The longest matches come first, and those that can't be better than the best are not looked at.

    def longest_prefix(self, tokens: Sequence[int], scope: Hashable) -> int:
        """Return the most tokens that can be taken over from anywhere; at least one is left to compute."""
        best, limit = 0, len(tokens) - 1
        for matches in self._matches(tokens, scope):
            for source, shared in matches:
                if min(shared, limit) <= best:
                    break
                best = max(best, self._usable(source, min(shared, limit)))
        return best

    def prefixes_in_progress(self, tokens: Sequence[int], scope: Hashable) -> Iterator[tuple[int, int]]:
        """Yield slots whose planned tokens share a prefix with `tokens`, and its length, the longest first."""
        limit = len(tokens) - 1
        return ((slot, min(shared, limit)) for slot, shared in self._index.matches(tokens, scope))

    def branches(self, tokens: Sequence[int], scope: Hashable) -> list[int]:
        """Return the lengths at which what is or was here parts from these tokens, or ends."""
        return self._index.branches(tokens, scope) + self.ram.branches(tokens, scope)

    def _matches(self, tokens: Sequence[int], scope: Hashable) -> tuple[Iterator[tuple[Source, int]], ...]:
        """Return the slots, and the states in RAM, that share a prefix with `tokens`, each the longest first."""
        return self._index.matches(tokens, scope), self.ram.matches(tokens, scope)

    def _best_source(self, tokens: Sequence[int], scope: Hashable, idle: Sequence[int]) -> tuple[Source, int] | None:
        """Return the source that saves most, all in all, and how much can be taken over from it; None if nothing is.

        Of those that have to be moved it may be one that costs MOVE_COST_TOKENS more than another.
        """
        limit = len(tokens) - 1
        best: tuple[Source, int] | None = None
        best_gain = 0
        for slot, shared in self._index.shared_by(idle, tokens, scope):
            count = self._usable(slot, min(shared, limit))
            if count > best_gain:
                best, best_gain = (slot, count), count
        best_in_place, places = best, frozenset(idle)
        for matches in self._matches(tokens, scope):
            for source, shared in matches:
                shared = min(shared, limit)
                min_moved = 0 if self._shares_cells(source) else shared
                tolerance = 0 if best is best_in_place else MOVE_COST_TOKENS
                if shared - _move_cost(min_moved) - tolerance <= best_gain:
                    break
                if source in places:
                    continue
                count = self._usable(source, shared)
                gain = count - _move_cost(0 if self._shares_cells(source) else self._num_held(source))
                if count and gain > best_gain:
                    best, best_gain = (source, count), gain
        return best

    def _has_another_source(self, slot: int, tokens: Tokens, scope: Hashable, length: int) -> bool:
        """True if another source than `slot` has so many of these tokens, too."""
        for matches in self._matches(tokens, scope):
            for source, shared in matches:
                if shared < length:
                    break
                if source != slot and self._usable(source, shared) >= length:
                    return True
        return False

    def _num_held(self, source: Source) -> int:
        """Return how many tokens are computed."""
        return source.num_tokens if isinstance(source, SavedState) else self.cells.of(source)

    def _usable(self, source: Source, shared: int) -> int:
        """Return how many tokens can be taken over where `shared` are the same."""
        count = min(shared, self._num_held(source))
        return count if count >= self._first_cut(source) else self.checkpoints.longest(source, count)

    def _first_cut(self, source: Source) -> int:
        return source.first_cut if isinstance(source, SavedState) else self.memory.first_cut(source)

    def _checkpoint_for(self, source: Source, count: int) -> Any | None:
        """Return what it takes to cut the source back to so many tokens, or to copy them; None if nothing."""
        return None if count >= self._first_cut(source) else self.checkpoints.at(source, count)

    def _shares_cells(self, source: Source) -> bool:
        """True if a copy takes no cells."""
        return self.memory.unified and not isinstance(source, SavedState) and self.memory.partial_reuse

    # Finding a slot

    def find_slot(
        self, tokens: Sequence[int], scope: Hashable, idle: Sequence[int], preferred: int | None = None
    ) -> Placement:
        """Return the cheapest of the `idle` slots for a sequence; the `preferred` one if no prefix decides."""
        best = self._best_source(tokens, scope, idle)
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
        """Return the preferred slot, else the first empty one (llama.cpp likes dense ids), else the longest idle.

        A slot with a prefix that a waiting sequence needs comes last.
        """

        def rank(slot: int) -> tuple[bool, bool, int, int]:
            return slot != preferred, self.cells.of(slot) > 0, self._records[slot].last_used, slot

        order = sorted(idle, key=rank)
        return next((slot for slot in order if not self._is_demanded(slot)), order[0])

    def _is_demanded(self, slot: int) -> bool:
        """True if a sequence waits for a prefix that only this slot has."""
        if slot not in self._index:
            return False
        tokens, scope = self._index.entry_of(slot)
        length = self._usable(slot, self._demanded_prefix(tokens, scope))
        if length < WORTH_SAVING_TOKENS or self.cells.of(slot) < len(tokens):  # a running one
            return False
        return not self._has_another_source(slot, tokens, scope, length)

    def missing_cells(self, placement: Placement, num_tokens: int) -> int:
        """Return how many cells are missing for `num_tokens` positions once the placement is carried out."""
        source = placement.source
        if isinstance(source, SavedState):
            num_tokens = max(num_tokens, source.num_tokens)  # it comes back whole before it is cut
        stays = source is not None and (source == placement.slot or self._shares_cells(source))
        saved_by_sharing = placement.num_tokens if stays else 0
        freed = 0 if source == placement.slot else self.cells.own(placement.slot)
        return num_tokens - saved_by_sharing - self.cells.free - freed

    # Assigning a slot

    def assign_slot(self, placement: Placement, tokens: Sequence[int], scope: Hashable) -> int:
        """Carry a placement out for a sequence of these tokens; return how many of them its slot holds now."""
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
        record = self._records[slot]
        record.is_unsaved, record.note = False, None
        kept = self.truncate(slot, count)
        self.counters.hits_slot += kept > 0
        return kept

    def _load_prefix(self, placement: Placement) -> int:
        """Fill the empty slot of a placement; return 0 where that fails, which costs only time."""
        try:
            return self._restore(placement) if isinstance(placement.source, SavedState) else self._copy(placement)
        except Exception:  # no memory for the buffers, for instance
            log.exception("can't take a state over; it is computed again")
            self.wipe(placement.slot)
            return 0

    def _restore(self, placement: Placement) -> int:
        source, slot, count = placement.source, placement.slot, placement.num_tokens
        assert isinstance(source, SavedState)
        if self.memory.unified and source.num_tokens > self.cells.free:
            return 0  # it has no free cells just now
        if not self.memory.restore(slot, source.data, count, self._checkpoint_for(source, count)):
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
        if not self.memory.copy(source, slot, count, self._checkpoint_for(source, count)):
            return 0
        self._copy_cells(source, slot, count)
        self.checkpoints.inherit(slot, source, count)
        self.counters.hits_copy += 1
        self._touch(source)
        return count

    def _copy_cells(self, source: int, slot: int, count: int) -> None:
        if self._shares_cells(source):
            self.cells.copy(source, slot, count)
        else:
            self.cells.extend(slot, count)

    def _index_slot(self, slot: int, tokens: Sequence[int], scope: Hashable) -> None:
        self._index.insert(slot, tokens, scope)
        self._touch(slot)

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._records[slot].last_used = self._clock

    def extend(self, slot: int, count: int) -> None:
        """Account for `count` positions that were computed."""
        self.cells.extend(slot, count)

    def take_checkpoint(self, slot: int) -> None:
        """Allow others to take over what the slot holds now, as far as the quota goes."""
        self.checkpoints.take(slot, self.cells.of(slot))

    def truncate(self, slot: int, count: int) -> int:
        """Keep the first positions of a slot, or as many of them as it can be cut back to; return how many."""
        first_cut = self.memory.first_cut(slot)
        kept = count if count >= first_cut else self.checkpoints.longest(slot, count)
        checkpoint = None if kept >= first_cut else self.checkpoints.at(slot, kept)
        if not self.memory.trim(slot, kept, checkpoint):
            kept = 0
        self.cells.trim(slot, kept)
        self.checkpoints.cut(slot, kept)
        return kept

    def retire(
        self, slot: int, tokens: Sequence[int], scope: Hashable, *, save: bool, note: StateNote | None = None
    ) -> None:
        """Keep the cells of a slot whose sequence has ended, and which hold `tokens`, for a later sequence."""
        self._index_slot(slot, tokens, scope)
        record = self._records[slot]
        record.note = note
        record.is_unsaved = save and self._is_worth_saving(len(tokens))

    def _is_worth_saving(self, num_tokens: int) -> bool:
        return self.ram.quota_bytes > 0 and num_tokens >= WORTH_SAVING_TOKENS

    def clear(self, slot: int) -> None:
        """Empty a slot, after saving what is worth it."""
        if self.ram.quota_bytes and self._is_demanded(slot):
            self._records[slot].is_unsaved = True
        self.save_unsaved(slot)
        self.wipe(slot)

    def wipe(self, slot: int) -> None:
        """Empty a slot without saving anything, for instance because its contents are unknown."""
        record = self._records[slot]
        record.is_unsaved, record.note = False, None
        self._index.remove(slot)
        self.truncate(slot, 0)

    def reclaim(self, idle: Iterable[int], missing: int) -> bool:
        """Empty idle slots until `missing` cells are free; return False, and empty none, if they have too few.

        Slots without a demanded prefix go first, and of them the longest unused.
        """
        if missing <= 0:
            return True
        slots = sorted(idle, key=lambda slot: (self._is_demanded(slot), self._records[slot].last_used))
        if missing > self.cells.freed_by(slots):
            return False
        needed = self.cells.free + missing
        for slot in slots:
            if self.cells.free >= needed:
                break
            self.clear(slot)
        return True

    # Moving between slots

    def swap(self, slot: int, other: int) -> bool:
        """Exchange the contents of two slots that share no cells; a content that can't be moved is lost.

        What `slot` had is copied with all that can be taken over from it, what `other` had is saved and restored.
        Return False if nothing has changed. When it raises, the contents of both are unknown.
        """
        num_tokens = self.cells.of(slot)
        try:
            state = self.memory.save(other) if self.cells.of(other) else None
        except Exception:  # no memory for the buffers, for instance
            log.exception("can't exchange two slots; they stay as they are")
            return False
        self.memory.trim(other, 0)
        if num_tokens and not self._fills(other, self.memory.copy, slot, other, num_tokens):
            self._lose_contents(slot)
        self.memory.trim(slot, 0)
        if state is not None and not self._fills(slot, self.memory.restore, slot, state, self.cells.of(other)):
            self._lose_contents(other)
            self._records[other].is_unsaved = False
        self.cells.swap(slot, other)
        self.checkpoints.swap(slot, other)
        self._swap_entries(slot, other)
        self._records[slot], self._records[other] = self._records[other], self._records[slot]
        return True

    def _lose_contents(self, slot: int) -> None:
        self.cells.trim(slot, 0)
        self.checkpoints.cut(slot, 0)

    def _fills(self, slot: int, action: Callable[..., bool], *args: Any) -> bool:
        try:
            return action(*args)
        except Exception:
            log.exception("can't move a state between slots; it is computed again when it is needed")
            self.memory.trim(slot, 0)
            return False

    def _swap_entries(self, slot: int, other: int) -> None:
        """Both entries leave the index before one comes back, so that no thread finds tokens with a wrong scope."""
        entries = [
            (target, self._index.entry_of(held))
            for held, target in ((slot, other), (other, slot))
            if held in self._index
        ]
        self._index.remove(slot)
        self._index.remove(other)
        for target, (tokens, scope) in entries:
            self._index.insert(target, tokens, scope)

    # RAM

    def save(self, slot: int, tokens: Sequence[int], scope: Hashable, note: StateNote | None = None) -> None:
        """Copy a slot's cells, which hold `tokens`, to RAM, as far as the quota goes."""
        self._records[slot].is_unsaved = False
        if self._is_worth_saving(len(tokens)):
            self.ram.save(slot, tokens, scope, note)

    def save_unsaved(self, slot: int) -> None:
        """Save an idle slot, if it is worth it and not saved yet."""
        record = self._records[slot]
        if record.is_unsaved:
            self.save(slot, *self._index.entry_of(slot), record.note)

    def save_one_idle(self) -> bool:
        """Save the slot that has been idle for longest; return False if there is none. For times without a step."""
        slot = min(self.unsaved(), key=lambda slot: self._records[slot].last_used, default=None)
        if slot is None:
            return False
        self.save_unsaved(slot)
        return True

    def unsaved(self) -> list[int]:
        """Return the idle slots that are worth saving, and are not saved yet."""
        return [slot for slot, record in enumerate(self._records) if record.is_unsaved]

    def forget_scope(self, scope: Hashable) -> None:
        """Drop the saved states of a scope that will not be asked for again."""
        self.ram.forget_scope(scope)

    # Any thread

    def probe(self, running: Sequence[SlotContents | None], tokens: Tokens, scope: Hashable) -> dict[CacheTier, int]:
        """Return how many of the first tokens a slot has, and a state in RAM. Any thread: it may be a moment behind.

        `running` has what the running sequence of each slot has computed, and None for an idle slot.
        """
        device = ram = 0
        for slot, contents in enumerate(running):
            held = self._contents_of(slot) if contents is None else contents
            if held is not None and held[1] == scope:
                first_cut = 0 if self.memory.partial_reuse else len(held[0])
                device = max(device, self._probed(slot, common_length(tuple(held[0]), tokens), first_cut))
        for state in self.ram.states():
            if state.scope == scope:
                ram = max(ram, self._probed(state, common_length(state.tokens, tokens), state.first_cut))
        return {"device": device, "ram": ram}

    def _contents_of(self, slot: int) -> SlotContents | None:
        """Return what an idle slot holds."""
        try:
            return self._index.entry_of(slot)
        except KeyError:
            return None

    def _probed(self, source: Source, shared: int, first_cut: int) -> int:
        """As `_usable`, without asking the device."""
        if shared >= first_cut:
            return shared
        return max((length for length in self.checkpoints.lengths(source) if length <= shared), default=0)


def _move_cost(num_moved: int) -> int:
    """Return the cost of moving a state as a whole, however little of it is taken over."""
    return MOVE_COST_TOKENS + num_moved // MOVED_PER_TOKEN

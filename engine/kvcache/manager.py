"""Track which tokens each slot contains, which prefixes new sequences can reuse, and which states are saved to RAM.

A slot keeps its cells when its sequence finishes, so a later sequence with the same prefix can reuse them. When another
sequence needs the slot, the slot's cells are first copied to RAM (ram_tier.py), unless there are too few cells to be
worth saving. All changes to the device's cells are made through KvCache. Only the engine thread uses KvCache, except
for `probe`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cellama.config.logging import event_logger
from cellama.engine.backend import KvMemory
from cellama.engine.events import CacheTier

from .prefix import PrefixIndex, Tokens, common_length
from .ram_tier import Checkpoints, RamTier, SavedState, Source, StateNote

log = event_logger(__name__)

MIN_SAVED_TOKENS = 64  # computing fewer tokens is faster than copying them to RAM and back
# Cost of moving a state, in tokens of prefill that could be computed in the same time (ADR 003). The cost has a
# constant part, and one token for every MOVED_PER_TOKEN tokens of the state, which is between 20 and 80 depending on
# model and length.
MOVE_COST_TOKENS = 16
MOVED_PER_TOKEN = 32

SlotContents = tuple[Sequence[int], Hashable]  # the tokens that are computed in a slot, and their scope


@dataclass(eq=False, slots=True)
class _Block:
    """Consecutive cells that are owned by the same slots."""

    size: int
    num_owners: int = 1


class Cells:
    """Counts the KV cells in use, grouped into blocks of consecutive positions.

    The count is exact, and a cell shared by several slots is counted once. If `shared` is true, slots can share the
    cells of a prefix. This class doesn't access the device.
    """

    def __init__(self, n_slots: int, total: int, *, shared: bool) -> None:
        self.total = total
        self.shared = shared
        self.used = 0
        self._blocks: list[list[_Block]] = [[] for _ in range(n_slots)]

    @property
    def free(self) -> int:
        return self.total - self.used

    def of(self, slot: int) -> int:
        """Return the number of positions that are filled in the slot."""
        return sum(block.size for block in self._blocks[slot])

    def exclusive_to(self, slot: int) -> int:
        """Return the number of cells that only this slot uses."""
        return sum(block.size for block in self._blocks[slot] if block.num_owners == 1)

    def freed_by(self, slots: Collection[int]) -> int:
        """Return the number of cells that emptying all of these slots would free."""
        owners: Counter[_Block] = Counter(block for slot in slots for block in self._blocks[slot])
        return sum(block.size for block, count in owners.items() if count == block.num_owners)

    def extend(self, slot: int, count: int) -> None:
        """Add `count` new cells to the slot."""
        blocks = self._blocks[slot]
        if blocks and blocks[-1].num_owners == 1:
            blocks[-1].size += count
        else:
            blocks.append(_Block(count))
        self.used += count

    def trim(self, slot: int, count: int) -> None:
        """Keep the first `count` positions of the slot. Later cells become free unless another slot shares them."""
        num_blocks = self._cut(slot, count)
        for block in self._blocks[slot][num_blocks:]:
            block.num_owners -= 1
            if block.num_owners == 0:
                self.used -= block.size
        del self._blocks[slot][num_blocks:]

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of `source` to the empty slot `target`, either as shared or as new cells."""
        assert not self._blocks[target]
        if not self.shared:
            self.extend(target, count)
            return
        blocks = self._blocks[source][: self._cut(source, count)]
        for block in blocks:
            block.num_owners += 1
        self._blocks[target] = blocks

    def swap(self, slot: int, other: int) -> None:
        """Swap the cells of two slots."""
        self._blocks[slot], self._blocks[other] = self._blocks[other], self._blocks[slot]

    def _cut(self, slot: int, count: int) -> int:
        """Return the number of blocks that contain the first `count` positions.

        If position `count` is inside a block, the block is split there.
        """
        position = 0
        for index, block in enumerate(self._blocks[slot]):
            if position >= count:
                return index
            if position + block.size > count:
                self._split(block, count - position)
                return index + 1
            position += block.size
        return len(self._blocks[slot])

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.num_owners)
        block.size = size
        for blocks in self._blocks:
            if block in blocks:  # compares identity, because blocks define no equality
                blocks.insert(blocks.index(block) + 1, rest)


@dataclass(frozen=True, slots=True)
class Placement:
    """A sequence's slot, and the number of leading tokens that the sequence reuses from `source`."""

    slot: int
    source: Source | None
    num_tokens: int

    @property
    def tier(self) -> CacheTier:
        """The tier of the reused prefix, or "device" if no prefix is reused."""
        return self.source.tier if isinstance(self.source, SavedState) else "device"


@dataclass(slots=True)
class CacheCounters:
    """Counts of reused and missed prefixes since the engine started."""

    hits_slot: int = 0  # the sequence continued in the slot that has its prefix
    hits_copy: int = 0  # the prefix was copied from another slot
    hits_ram: int = 0
    hits_disk: int = 0  # the prefix was read from disk for this sequence
    misses: int = 0


@dataclass(slots=True)
class _SlotRecord:
    """Additional data about a slot. Cells, tokens and checkpoints are stored elsewhere."""

    last_used: int = 0  # sequence number of the slot's last use
    is_unsaved: bool = False  # whether the slot is idle, long enough to save, and not saved yet
    note: StateNote | None = None  # note of the sequence that finished in the slot


class KvCache:
    """The KV states in all slots and in RAM, whose prefixes new sequences can reuse."""

    def __init__(
        self, memory: KvMemory, ram_bytes: int = 0, demanded_prefix: Callable[[Tokens, Hashable], int] | None = None
    ) -> None:
        """Create a cache that uses at most `ram_bytes` for saved states and checkpoints.

        If `ram_bytes` is 0, nothing is saved. `demanded_prefix` returns the length of the longest prefix that these
        tokens share with a waiting sequence.
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

    # Finding a prefix. Matches are sorted by length, the longest first. A search stops at the first match that can't be
    # better than the best one.

    def longest_prefix(self, tokens: Sequence[int], scope: Hashable) -> int:
        """Return the length of the longest prefix that any source can provide.

        The result is at most the number of tokens minus one, because at least one token must be computed.
        """
        best, limit = 0, len(tokens) - 1
        for matches in self._matches(tokens, scope):
            for source, shared in matches:
                if min(shared, limit) <= best:
                    break
                best = max(best, self._usable(source, min(shared, limit)))
        return best

    def prefixes_in_progress(self, tokens: Sequence[int], scope: Hashable) -> Iterator[tuple[int, int]]:
        """Yield slots with computed or planned tokens that share a prefix with `tokens`, longest prefix first."""
        limit = len(tokens) - 1
        return ((slot, min(shared, limit)) for slot, shared in self._index.matches(tokens, scope))

    def branches(self, tokens: Sequence[int], scope: Hashable) -> list[int]:
        """Return the lengths at which the tokens of slots and saved states diverge from `tokens` or end."""
        return self._index.branches(tokens, scope) + self.ram.branches(tokens, scope)

    def _matches(self, tokens: Sequence[int], scope: Hashable) -> tuple[Iterator[tuple[Source, int]], ...]:
        """Return two iterators over slots and RAM states that share a prefix with `tokens`, longest prefix first."""
        return self._index.matches(tokens, scope), self.ram.matches(tokens, scope)

    def _best_source(self, tokens: Sequence[int], scope: Hashable, idle: Sequence[int]) -> tuple[Source, int] | None:
        """Return the source that saves the most tokens, and the number of tokens that it provides, or None.

        A source's gain is the number of tokens that it provides, minus the cost of moving the source. If sources must
        be moved, the search stops early. The gain of the returned source can then be up to MOVE_COST_TOKENS below the
        maximum.
        """
        limit = len(tokens) - 1
        best: tuple[Source, int] | None = None
        best_gain = 0
        for slot, shared in self._index.shared_by(idle, tokens, scope):
            count = self._usable(slot, min(shared, limit))
            if count > best_gain:
                best, best_gain = (slot, count), count
        best_in_place, idle_slots = best, frozenset(idle)
        for matches in self._matches(tokens, scope):
            for source, shared in matches:
                shared = min(shared, limit)
                min_moved = 0 if self._shares_cells(source) else shared
                tolerance = 0 if best is best_in_place else MOVE_COST_TOKENS
                if shared - _move_cost(min_moved) - tolerance <= best_gain:
                    break
                if source in idle_slots:
                    continue
                count = self._usable(source, shared)
                gain = count - _move_cost(0 if self._shares_cells(source) else self._num_held(source))
                if count and gain > best_gain:
                    best, best_gain = (source, count), gain
        return best

    def _has_another_source(self, slot: int, tokens: Tokens, scope: Hashable, length: int) -> bool:
        """Return whether any source except `slot` can provide the first `length` of these tokens."""
        for matches in self._matches(tokens, scope):
            for source, shared in matches:
                if shared < length:
                    break
                if source != slot and self._usable(source, shared) >= length:
                    return True
        return False

    def _num_held(self, source: Source) -> int:
        """Return the number of computed tokens in a source."""
        return source.num_tokens if isinstance(source, SavedState) else self.cells.of(source)

    def _usable(self, source: Source, shared: int) -> int:
        """Return the number of tokens that the source can provide if its first `shared` tokens match."""
        count = min(shared, self._num_held(source))
        return count if count >= self._first_cut(source) else self.checkpoints.longest(source, count)

    def _first_cut(self, source: Source) -> int:
        return source.first_cut if isinstance(source, SavedState) else self.memory.first_cut(source)

    def _checkpoint_for(self, source: Source, count: int) -> Any | None:
        """Return the checkpoint needed to truncate or copy the source to `count` tokens, or None if none is needed."""
        return None if count >= self._first_cut(source) else self.checkpoints.at(source, count)

    def _shares_cells(self, source: Source) -> bool:
        """Return whether a copy of the source would share its cells instead of using new cells."""
        return self.memory.unified and not isinstance(source, SavedState) and self.memory.partial_reuse

    # Finding a slot

    def find_slot(
        self, tokens: Sequence[int], scope: Hashable, idle: Sequence[int], preferred: int | None = None
    ) -> Placement:
        """Return a placement in the cheapest of the `idle` slots.

        If the sequence can't reuse a prefix, the `preferred` slot is chosen if possible.
        """
        best = self._best_source(tokens, scope, idle)
        if best is None:
            return Placement(self._cheapest(idle, preferred), None, 0)
        source, count = best
        if isinstance(source, int) and source in idle and self._may_overwrite(source, count, idle):
            return Placement(source, source, count)
        others = [slot for slot in idle if slot != source]
        return Placement(self._cheapest(others, preferred), source, count) if others else Placement(idle[0], None, 0)

    def _may_overwrite(self, slot: int, count: int, idle: Sequence[int]) -> bool:
        """Return whether a sequence may overwrite a slot's cells that follow the reused prefix.

        Overwriting these cells is allowed if the sequence reuses at least half of the slot's cells, or if no other slot
        is idle.
        """
        return len(idle) == 1 or self.cells.of(slot) - count <= count

    def _cheapest(self, idle: Sequence[int], preferred: int | None) -> int:
        """Return the preferred slot, or else an empty slot, or else the slot that has been idle for the longest time.

        A slot whose prefix is needed by a waiting sequence is chosen last. Empty slots are chosen in order, because
        llama.cpp is faster if slot numbers are dense.
        """

        def rank(slot: int) -> tuple[bool, bool, int, int]:
            return slot != preferred, self.cells.of(slot) > 0, self._records[slot].last_used, slot

        order = sorted(idle, key=rank)
        return next((slot for slot in order if not self._is_demanded(slot)), order[0])

    def _is_demanded(self, slot: int) -> bool:
        """Return whether a waiting sequence needs a prefix that is available only in this slot."""
        if slot not in self._index:
            return False
        tokens, scope = self._index.entry_of(slot)
        length = self._usable(slot, self._demanded_prefix(tokens, scope))
        if length < MIN_SAVED_TOKENS or self.cells.of(slot) < len(tokens):  # a running sequence
            return False
        return not self._has_another_source(slot, tokens, scope, length)

    def missing_cells(self, placement: Placement, num_tokens: int) -> int:
        """Return how many cells are missing if a sequence needs `num_tokens` positions after this placement."""
        source = placement.source
        if isinstance(source, SavedState):
            num_tokens = max(num_tokens, source.num_tokens)  # the state is restored completely before it is truncated
        stays = source is not None and (source == placement.slot or self._shares_cells(source))
        saved_by_sharing = placement.num_tokens if stays else 0
        freed = 0 if source == placement.slot else self.cells.exclusive_to(placement.slot)
        return num_tokens - saved_by_sharing - self.cells.free - freed

    # Assigning a slot

    def assign_slot(self, placement: Placement, tokens: Sequence[int], scope: Hashable) -> int:
        """Carry out the placement of a sequence with these tokens.

        Return how many of the sequence's tokens the slot then contains.
        """
        if placement.source is not None and placement.source == placement.slot:
            count = self._continue_in(placement.slot, placement.num_tokens)
        else:
            if isinstance(placement.source, SavedState):
                self.ram.touch(placement.source)  # so that saving the slot's contents does not evict it
            self.clear(placement.slot)
            count = self._load_prefix(placement)
        self.counters.misses += count == 0
        self._index_slot(placement.slot, tokens, scope)
        return count

    def _continue_in(self, slot: int, count: int) -> int:
        if self.cells.of(slot) - count >= MIN_SAVED_TOKENS:
            self.save_unsaved(slot)
        record = self._records[slot]
        record.is_unsaved, record.note = False, None
        num_reused = self.truncate(slot, count)
        self.counters.hits_slot += num_reused > 0
        return num_reused

    def _load_prefix(self, placement: Placement) -> int:
        """Copy or restore the prefix into the empty slot. Return the prefix length in tokens, or 0 after a failure."""
        try:
            return self._restore(placement) if isinstance(placement.source, SavedState) else self._copy(placement)
        except Exception:  # out of memory, for example
            log.exception("prefix reuse failed", slot=placement.slot, detail="the prefix's tokens will be recomputed")
            self.wipe(placement.slot)
            return 0

    def _restore(self, placement: Placement) -> int:
        source, slot, count = placement.source, placement.slot, placement.num_tokens
        assert isinstance(source, SavedState)
        if self.memory.unified and source.num_tokens > self.cells.free:
            return 0  # the pool has too few free cells at the moment
        if not self.memory.restore(slot, source.data, count, self._checkpoint_for(source, count)):
            self.ram.forget(source)  # a damaged state counts as a miss and never causes a wrong text
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
        """Record that `count` more positions have been computed in the slot."""
        self.cells.extend(slot, count)

    def take_checkpoint(self, slot: int) -> None:
        """Take a checkpoint at the slot's current length if it fits into the quota."""
        self.checkpoints.take(slot, self.cells.of(slot))

    def truncate(self, slot: int, count: int) -> int:
        """Keep the first `count` positions of a slot, or fewer if the slot can't be truncated to this length.

        Return the number of remaining positions.
        """
        first_cut = self.memory.first_cut(slot)
        length = count if count >= first_cut else self.checkpoints.longest(slot, count)
        checkpoint = None if length >= first_cut else self.checkpoints.at(slot, length)
        if not self.memory.trim(slot, length, checkpoint):
            length = 0
        self.cells.trim(slot, length)
        self.checkpoints.cut(slot, length)
        return length

    def retire(
        self, slot: int, tokens: Sequence[int], scope: Hashable, *, save: bool, note: StateNote | None = None
    ) -> None:
        """Keep a finished sequence's cells, which contain `tokens`, in its slot for later sequences."""
        self._index_slot(slot, tokens, scope)
        record = self._records[slot]
        record.note = note
        record.is_unsaved = save and self._should_save(len(tokens))

    def _should_save(self, num_tokens: int) -> bool:
        return self.ram.quota_bytes > 0 and num_tokens >= MIN_SAVED_TOKENS

    def clear(self, slot: int) -> None:
        """Empty a slot. If the slot's contents are worth saving, first save the contents to RAM."""
        if self.ram.quota_bytes and self._is_demanded(slot):
            self._records[slot].is_unsaved = True
        self.save_unsaved(slot)
        self.wipe(slot)

    def wipe(self, slot: int) -> None:
        """Empty a slot without saving its contents, for example because the contents are unknown."""
        record = self._records[slot]
        record.is_unsaved, record.note = False, None
        self._index.remove(slot)
        self.truncate(slot, 0)

    def reclaim(self, idle: Iterable[int], missing: int) -> bool:
        """Empty idle slots until `missing` more cells are free.

        If emptying all idle slots would not free enough cells, return False without emptying any slot. Slots whose
        prefix is not needed by a waiting sequence are emptied first, least recently used first.
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
        """Swap the contents of two slots that share no cells. Return False if nothing was changed.

        The contents of `slot` are copied, and the contents of `other` are saved and restored. Contents that can't be
        moved are lost. If this method raises an exception, the contents of both slots are unknown.
        """
        num_tokens = self.cells.of(slot)
        try:
            state = self.memory.save(other) if self.cells.of(other) else None
        except Exception:  # out of memory, for example
            log.exception(
                "slot contents not swapped", slot=slot, other=other, detail="the state can't be copied to RAM"
            )
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
            log.exception("KV state not moved", detail="the state's tokens will be recomputed when needed")
            self.memory.trim(slot, 0)
            return False

    def _swap_entries(self, slot: int, other: int) -> None:
        """Swap the index entries of two slots.

        Both entries are removed first, so another thread can't find tokens in the wrong scope.
        """
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
        """Copy a slot's cells, which contain `tokens`, to RAM.

        Nothing is copied if the cells are too few to be worth saving or don't fit into the quota.
        """
        self._records[slot].is_unsaved = False
        if self._should_save(len(tokens)):
            self.ram.save(slot, tokens, scope, note)

    def save_unsaved(self, slot: int) -> None:
        """Save an idle slot's contents unless they are already saved or not worth saving."""
        record = self._records[slot]
        if record.is_unsaved:
            self.save(slot, *self._index.entry_of(slot), record.note)

    def save_one_idle(self) -> bool:
        """Save the slot that has been idle for the longest time. Return False if no slot needs to be saved."""
        slot = min(self.unsaved(), key=lambda slot: self._records[slot].last_used, default=None)
        if slot is None:
            return False
        self.save_unsaved(slot)
        return True

    def unsaved(self) -> list[int]:
        """Return the idle slots that should be saved but have not been saved yet."""
        return [slot for slot, record in enumerate(self._records) if record.is_unsaved]

    def forget_scope(self, scope: Hashable) -> None:
        """Discard the saved states of a scope that will not be used by any later request."""
        self.ram.forget_scope(scope)

    # Any thread

    def probe(self, running: Sequence[SlotContents | None], tokens: Tokens, scope: Hashable) -> dict[CacheTier, int]:
        """Return how many leading tokens are in a slot, and how many are in RAM.

        Any thread may call this method, and the result can be slightly out of date. `running` contains the computed
        tokens and the scope of each slot's running sequence, or None for an idle slot.
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
        """Return the tokens and scope of an idle slot."""
        try:
            return self._index.entry_of(slot)
        except KeyError:
            return None

    def _probed(self, source: Source, shared: int, first_cut: int) -> int:
        """Compute the result of `_usable` without accessing the device."""
        if shared >= first_cut:
            return shared
        return max((length for length in self.checkpoints.lengths(source) if length <= shared), default=0)


def _move_cost(num_moved: int) -> int:
    """Return the cost of moving a state of `num_moved` tokens.

    The complete state is moved even if only part of it is used.
    """
    return MOVE_COST_TOKENS + num_moved // MOVED_PER_TOKEN

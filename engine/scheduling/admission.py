"""Admission: order the waiting queue, choose a slot and a prefix for the next sequence, and plan prefill cuts."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence as Seq
from typing import Literal

from cellama.engine.errors import QueueFull
from cellama.engine.kvcache.disk_tier import DiskTier
from cellama.engine.kvcache.manager import KvCache, Placement
from cellama.engine.kvcache.prefix import PrefixIndex
from cellama.engine.request import INTERACTIVE_PRIORITY, Request

from .sequence import Sequence, SlotTable, State
from .shares import FairShares
from .slot_layout import adjacent_slot, by_nearness
from .strategies import yields_slot_despite_age

MAX_EMPTY = 16  # stale heap entries beyond twice the number of sequences; with more, the heap is rebuilt
AGEING_S = 30.0  # seconds of waiting worth one priority level: after 4.5 minutes, priority 9 precedes a new priority 0
MIN_AWAITED_TOKENS = 64  # a shorter prefix that another slot is computing is not worth waiting for
GROWTH_TOKENS = 16  # cells per running sequence that an admission leaves free in a pool: for about 16 steps
MIN_CUT_DISTANCE = 64  # tokens between two cuts: fewer are computed faster than a checkpoint is restored
MAX_CUTS = 8  # cuts of an admitted prompt, each of which costs a pass; later requests can add the same number
TURN_END_TOKENS = 4  # tokens at the end of a chat prompt that the next turn may lack, such as an opened reasoning block


class _Heap:
    """A min-heap that orders sequences by a number.

    A removed sequence's entry stays in the heap until the entry reaches the top.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int]] = []
        self._sequences: dict[int, Sequence] = {}  # sequences by order of arrival

    def push(self, number: float, sequence: Sequence) -> None:
        """Add a sequence that is not in the heap."""
        self._sequences[sequence.order] = sequence
        heapq.heappush(self._entries, (number, sequence.order))

    @property
    def first(self) -> tuple[float, int]:
        """The smallest number and its sequence's arrival order, or (infinity, 0) if the heap is empty."""
        while self._entries and self._entries[0][1] not in self._sequences:
            heapq.heappop(self._entries)
        return self._entries[0] if self._entries else (math.inf, 0)

    def pop(self, up_to: float = math.inf) -> Sequence | None:
        """Remove and return the sequence with the smallest number, or None if that number is greater than `up_to`."""
        number, order = self.first
        if not self._entries or number > up_to:
            return None
        heapq.heappop(self._entries)
        return self._sequences.pop(order)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is in the heap."""
        self._sequences.pop(sequence.order, None)
        if len(self._entries) > 2 * len(self._sequences) + MAX_EMPTY:
            self._entries = [entry for entry in self._entries if entry[1] in self._sequences]
            heapq.heapify(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __len__(self) -> int:
        return len(self._sequences)


class WaitingQueue:
    """Orders waiting sequences by priority and waiting time, and tracks the deadlines of all sequences.

    A waiting sequence gains urgency over time, so even the lowest priority is served eventually. Within a priority, the
    fairness key with the least service is next, and the key's oldest sequence is served first.
    """

    def __init__(self, shares: FairShares, max_waiting: int = 0) -> None:
        """Create a queue for at most `max_waiting` requests that can't get a slot immediately. 0 means no limit."""
        self.num_waiting = 0
        self._shares = shares
        self._num_requests = 0  # requests whose first sequence waits, which means that all of their sequences wait
        self._max_waiting = max_waiting
        self._arrivals = itertools.count()
        self._heaps: dict[int, dict[str, _Heap]] = {}  # sequences by priority and fairness key; none is empty
        self._deadlines = _Heap()
        self._prompts: PrefixIndex[Sequence] = PrefixIndex()

    def add(self, sequence: Sequence, now: float, num_idle: int = 0) -> None:
        """Add a new sequence while `num_idle` slots are idle. Raises QueueFull.

        A request counts once, even if it generates several completions. A request that can get a slot immediately is
        never rejected.
        """
        if self._max_waiting and sequence.index == 0:
            num_others = self.num_waiting - self._num_requests
            num_left = self._num_requests - max(0, num_idle - num_others)  # requests that can't have a slot now
            if self.num_waiting >= num_idle and num_left >= self._max_waiting:
                raise QueueFull(
                    f"max_queue: {num_left} requests are already waiting, but the limit is {self._max_waiting}; "
                    "retry later"
                )
        # Ageing without a clock: all waiting sequences age equally, so their order at arrival stays right.
        sequence.rank = now + AGEING_S * sequence.request.priority
        sequence.order = next(self._arrivals)
        self._start_waiting(sequence, is_new=True)
        if sequence.deadline is not None:
            self._deadlines.push(sequence.deadline, sequence)

    def add_preempted(self, sequence: Sequence, now: float) -> None:
        """Add a sequence that has lost its slot.

        The time that the sequence spent in the slot doesn't count as waiting time.
        """
        sequence.rank = rank_if_preempted(sequence, now)
        self._start_waiting(sequence, is_new=False)

    def _start_waiting(self, sequence: Sequence, *, is_new: bool) -> None:
        tokens = sequence.tokens if sequence.num_output else sequence.request.prompt  # the prompt is not copied
        self._prompts.insert(sequence, tokens, sequence.scope)
        self.num_waiting += 1
        self._num_requests += sequence.index == 0
        self._shares.start_waiting(sequence, is_new=is_new)
        self.requeue(sequence)

    def pop(self, *, only: Literal["interactive", "bulk"] | None = None) -> Sequence | None:
        """Return the next sequence, or the next interactive or bulk sequence if `only` is given.

        The sequence still counts as waiting until `remove` is called.
        """
        heaps = [
            self._next_heap(priority)
            for priority in self._heaps
            if only is None or only == ("interactive" if priority <= INTERACTIVE_PRIORITY else "bulk")
        ]
        if not heaps:
            return None
        sequence = min(heaps, key=lambda heap: heap.first).pop()
        assert sequence is not None  # no heap is empty
        self._drop_if_empty(sequence.request)
        return sequence

    def _next_heap(self, priority: int) -> _Heap:
        """Return the heap of the fairness key that is served next within a priority."""
        heaps = self._heaps[priority]
        if len(heaps) == 1:
            return next(iter(heaps.values()))
        return min(heaps.items(), key=lambda item: (self._shares.of(priority, item[0]), item[1].first))[1]

    def _drop_if_empty(self, request: Request) -> None:
        heaps = self._heaps.get(request.priority, {})
        if request.share.key in heaps and not heaps[request.share.key]:
            del heaps[request.share.key]
            if not heaps:
                del self._heaps[request.priority]

    def requeue(self, sequence: Sequence) -> None:
        """Return a popped sequence to its previous position in the queue, unless it has finished."""
        if sequence.state is State.WAITING:
            heaps = self._heaps.setdefault(sequence.request.priority, {})
            heaps.setdefault(sequence.request.share.key, _Heap()).push(sequence.rank, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence that has received a slot or has finished."""
        self.num_waiting -= 1
        self._num_requests -= sequence.index == 0
        self._prompts.remove(sequence)
        self._shares.stop_waiting(sequence)
        if (heap := self._heaps.get(sequence.request.priority, {}).get(sequence.request.share.key)) is not None:
            heap.discard(sequence)
            self._drop_if_empty(sequence.request)

    def forget(self, sequence: Sequence) -> None:
        """Remove the deadline of a finished sequence."""
        self._deadlines.discard(sequence)

    def demanded_prefix(self, tokens: tuple[int, ...], scope: Hashable) -> int:
        """Return the length of the longest prefix, in tokens, that any waiting sequence shares with these tokens."""
        return self._prompts.longest(tokens, scope)

    def branches(self, sequence: Sequence) -> list[int]:
        """Return the prefix lengths at which other waiting sequences end or diverge from this sequence."""
        return self._prompts.branches(sequence.tokens, sequence.scope, at_least=2)

    @property
    def next_deadline(self) -> float:
        """The earliest deadline of a waiting or running sequence, or infinity."""
        return self._deadlines.first[0]

    def expired(self, now: float) -> Iterator[Sequence]:
        """Yield each waiting or running sequence whose deadline has passed. Each sequence is yielded only once."""
        while (sequence := self._deadlines.pop(now)) is not None:
            yield sequence

    def waiting(self) -> list[Sequence]:
        """Return all waiting sequences in arbitrary order."""
        return [sequence for heaps in self._heaps.values() for heap in heaps.values() for sequence in heap]

    @property
    def has_several_keys(self) -> bool:
        """Whether sequences with different fairness keys are waiting at the same priority."""
        return any(len(heaps) > 1 for heaps in self._heaps.values())


def rank_if_preempted(sequence: Sequence, now: float) -> float:
    """Return the rank that a running sequence would have if it returned to the queue.

    The time that the sequence has spent in its slot doesn't improve this rank.
    """
    return sequence.rank + now - (now if sequence.placed_at is None else sequence.placed_at)


class SlotFinder:
    """Finds slots for waiting sequences, running sequences to preempt, and prefixes that are worth waiting for.

    The finder places interactive sequences in adjacent slots, because llama.cpp can then decode these sequences in one
    pass (docs/adr/011).
    """

    def __init__(self, cache: KvCache, slots: SlotTable, shares: FairShares, bulk_slots: int = 0) -> None:
        """Create a finder. Interactive sequences never preempt the last `bulk_slots` bulk sequences."""
        self._cache = cache
        self._slots = slots
        self._shares = shares
        self._bulk_slots = bulk_slots
        self.disk: DiskTier | None = None

    def await_prefix(self, sequence: Sequence, now: float) -> bool:
        """Return whether the sequence should wait for a prefix that is being computed or read from a file.

        Another slot may be computing the prefix. If a state on disk contains a longer prefix than the slots and RAM,
        this method starts reading the state's file.
        """
        if sequence.waits_for is not None and _will_compute(*sequence.waits_for):
            return True
        sequence.waits_for = None
        if self._await_file(sequence, now):
            return True
        if None not in self._slots:
            return False  # no slot is idle, so searching for a prefix would not help
        ready = self._cache.longest_prefix(sequence.tokens, sequence.scope)
        for slot, length in self._cache.prefixes_in_progress(sequence.tokens, sequence.scope):
            holder = self._slots[slot]
            if length < ready + MIN_AWAITED_TOKENS:
                break  # the longest come first
            coming = 0 if holder is None else self._num_coming(holder, length)
            if holder is not None and coming >= ready + MIN_AWAITED_TOKENS and _will_compute(holder, coming):
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
        """Return how many of the shared tokens can be reused once the sequence `holder` has computed them."""
        if self._cache.memory.partial_reuse or shared == len(holder.tokens):
            return shared
        return max((cut for cut in holder.cuts if cut <= shared), default=0)

    def find_slot(self, sequence: Sequence, idle: list[int]) -> Placement | None:
        """Return a slot and a prefix for the sequence, or None if it must wait.

        This method may empty idle slots to free cells.
        """
        placement = self._cache.find_slot(sequence.tokens, sequence.scope, idle, self._preferred_slot(sequence, idle))
        needed = self._cells_needed(sequence)
        others = [slot for slot in idle if slot not in (placement.slot, placement.source)]
        if self._cache.reclaim(others, self._cache.missing_cells(placement, needed)):
            return placement
        without_prefix = Placement(placement.slot, None, 0)
        if self._cache.reclaim(idle, needed - self._cache.cells.free):
            return without_prefix
        if len(idle) < len(self._slots):
            return None
        # No sequence runs, so a prompt that `check` has accepted fits. No cells need to stay free for growth.
        return without_prefix if self._cache.reclaim(idle, len(sequence.tokens)) else None

    def would_fit(self, sequence: Sequence, idle: list[int], victims: list[Sequence]) -> bool:
        """Return whether enough cells would be free if all victims lost their slots."""
        slots = idle + [victim.slot for victim in victims if victim.slot is not None]
        cells = self._cache.cells
        return self._cells_needed(sequence, victims) <= cells.free + cells.freed_by(slots)

    def _preferred_slot(self, sequence: Sequence, idle: list[int]) -> int | None:
        """Return an empty slot next to the slots that are decoded with this sequence, or else next to any busy slot."""
        if self._cache.memory.unified:
            return None
        neighbours = self._slots_like(sequence) or self._slots.busy
        return adjacent_slot(neighbours, [slot for slot in idle if not self._cache.cells.of(slot)])

    def _slots_like(self, sequence: Sequence) -> list[int]:
        """Return the slots with this sequence's class and adapters, which llama.cpp can decode in one pass."""
        kind = _kind_of(sequence)
        return [slot for slot, s in enumerate(self._slots) if s and _kind_of(s) == kind]

    def victims(self, sequence: Sequence, now: float) -> list[Sequence]:
        """Return the running sequences that this sequence may preempt, in the order in which they should be preempted.

        Victims must be less urgent and rank behind this sequence in the queue. The time that a victim has spent in its
        slot doesn't improve its rank. An interactive sequence can also preempt a bulk sequence that ranks ahead, if the
        bulk sequence has held its slot for HOLD_S and generated a token.
        """
        less_urgent = [s for s in self._slots.running if s.request.priority > sequence.request.priority]
        ranks = {s: rank_if_preempted(s, now) for s in less_urgent}
        younger = [s for s in less_urgent if ranks[s] > sequence.rank]
        older = [s for s in less_urgent if ranks[s] <= sequence.rank and yields_slot_despite_age(s, sequence, now)]
        older.sort(key=lambda s: ranks[s], reverse=True)
        victims = self._cheapest_first(younger, sequence) + older
        needs_check = self._bulk_slots > 0 and sequence.request.is_interactive
        return self._without_guaranteed(victims) if needs_check else victims

    def _without_guaranteed(self, victims: list[Sequence]) -> list[Sequence]:
        """Return the victims, except for bulk sequences whose slots are guaranteed."""
        num_bulk = max(0, self._slots.num_bulk - self._bulk_slots)
        bulk = [victim for victim in victims if not victim.request.is_interactive]
        kept = set(bulk[num_bulk:])
        return [victim for victim in victims if victim not in kept]

    def _cheapest_first(self, victims: list[Sequence], sequence: Sequence) -> list[Sequence]:
        """Return the victims in the order in which they should be preempted.

        The least urgent sequences are first. Among equally urgent sequences, those whose fairness key has received the
        most service are first. Remaining ties are usually resolved as in `preemption_order`. If an interactive sequence
        needs a slot with its own cells, and states are saved to RAM, tied victims are instead sorted by distance to
        slots of the same class and adapters.
        """
        if self._cache.memory.unified or not self._cache.ram.quota_bytes or not sequence.request.is_interactive:
            return self.preemption_order(victims)
        slots = [victim.slot for victim in victims if victim.slot is not None]
        order = {slot: index for index, slot in enumerate(by_nearness(slots, self._slots_like(sequence)))}
        services = self._shares.services(victims)
        victims = sorted(victims, key=lambda victim: order[victim.slot or 0])
        return sorted(victims, key=lambda victim: (victim.request.priority, services[victim]), reverse=True)

    def preemption_order(self, running: list[Sequence]) -> list[Sequence]:
        """Return the running sequences in the order in which they should lose their slots.

        The least urgent sequences are first. Among equally urgent sequences, those whose fairness key has received the
        most service are first. The remaining ties are resolved in favor of older sequences, so the most recently
        admitted sequence loses its slot first.
        """
        services = self._shares.services(running)
        return sorted(
            running,
            key=lambda s: (s.request.priority, services[s], s.admitted_at or 0.0, s.order),
            reverse=True,
        )

    def _cells_needed(self, sequence: Sequence, victims: Seq[Sequence] = ()) -> int:
        """Return the number of cells needed by the sequence and by all running sequences except the victims."""
        if not self._cache.memory.unified:
            return 0  # each slot has its own cells
        gone = frozenset(victims)
        others = [holder for holder in self._slots.running if holder not in gone]
        return len(sequence.tokens) + 1 + sum(GROWTH_TOKENS + other.num_pending for other in others)


def _kind_of(sequence: Sequence) -> Hashable:
    return sequence.request.is_interactive, sequence.request.is_protected, sequence.adapters


def _will_compute(sequence: Sequence, length: int) -> bool:
    return sequence.state is State.PREFILLING and sequence.num_computed < length


class CutPlanner:
    """Plans cuts: the lengths at which a prefill stops to save a checkpoint.

    Cuts are needed only if slot states can't be truncated to arbitrary lengths. Other sequences can then reuse a shared
    prefix only up to a checkpoint.
    """

    def __init__(self, cache: KvCache, queue: WaitingQueue, slots: SlotTable) -> None:
        self._cache = cache
        self._queue = queue
        self._slots = slots

    @property
    def _is_enabled(self) -> bool:
        return self._cache.checkpoints.is_enabled

    def plan(self, sequence: Sequence, num_reused: int) -> None:
        """Plan the cuts for a sequence that is getting a slot.

        Cuts are planned where other prompts diverge, and near the end of a chat prompt.
        """
        sequence.cuts = ()
        if not self._is_enabled or not sequence.request.cache_prompt:
            return
        tokens, scope = sequence.tokens, sequence.scope
        lengths = {*self._queue.branches(sequence), *self._cache.branches(tokens, scope)}
        sequence.cuts = _cuts(lengths, num_reused, len(tokens) - 1)
        if sequence.request.prefill_only:  # later requests reuse the whole prompt
            sequence.cuts = (*sequence.cuts, sequence.num_prompt)
        elif sequence.request.reply is not None:
            end = sequence.num_prompt - TURN_END_TOKENS
            if end - max((num_reused, *sequence.cuts)) >= MIN_CUT_DISTANCE:
                sequence.cuts = (*sequence.cuts, end)

    def cut_for(self, sequence: Sequence) -> None:
        """Add a cut to a prefilling sequence at the end of the prefix that it shares with a new sequence.

        If the prefilling sequence has already passed that point, no cut is added.
        """
        if not self._is_enabled:
            return
        for slot, shared in self._cache.prefixes_in_progress(sequence.tokens, sequence.scope):
            holder = self._slots[slot]
            if shared < MIN_CUT_DISTANCE:
                break  # the longest come first
            if holder is not None and holder.state is State.PREFILLING and shared > holder.num_computed:
                below = max((cut for cut in holder.cuts if cut <= shared), default=0)
                if shared - below >= MIN_CUT_DISTANCE and len(holder.cuts) < 2 * MAX_CUTS:
                    holder.cuts = tuple(sorted((*holder.cuts, shared)))
                break


def _cuts(lengths: Iterable[int], start: int, max_length: int) -> tuple[int, ...]:
    """Return at most MAX_CUTS cuts.

    If a cut is omitted, requests that share its prefix can reuse the next shorter cut.
    """
    ordered = sorted({min(length, max_length) for length in lengths})
    distance = MIN_CUT_DISTANCE
    while len(cuts := _spaced(ordered, start, distance)) > MAX_CUTS:
        distance *= 2
    return tuple(cuts)


def _spaced(lengths: list[int], start: int, distance: int) -> list[int]:
    cuts: list[int] = []
    for length in lengths:
        if length - (cuts[-1] if cuts else start) >= distance:
            cuts.append(length)
    return cuts

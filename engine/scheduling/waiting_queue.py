"""The waiting queue of an engine: the most urgent first, but no sequence waits forever. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterator

from cellama.engine.errors import QueueFull
from cellama.engine.kvcache.prefix import PrefixIndex

from .sequence import Sequence, State

MAX_EMPTY = 16  # entries of sequences that left a heap, beyond twice as many as are in it: then it is rebuilt
AGEING_S = 30.0  # of waiting count as one step of priority: after 4.5 minutes priority 9 goes before a new priority 0


class _Heap:
    """Sequences by a number. One that leaves is forgotten at once; its entry is dropped later."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int]] = []
        self._sequences: dict[int, Sequence] = {}  # by order of arrival

    def push(self, number: float, sequence: Sequence) -> None:
        """Add a sequence that is not in it."""
        self._sequences[sequence.order] = sequence
        heapq.heappush(self._entries, (number, sequence.order))

    @property
    def first(self) -> tuple[float, int]:
        """The smallest number and the order of its sequence; infinity if the heap is empty."""
        while self._entries and self._entries[0][1] not in self._sequences:
            heapq.heappop(self._entries)
        return self._entries[0] if self._entries else (math.inf, 0)

    def pop(self, up_to: float = math.inf) -> Sequence | None:
        """Remove the sequence with the smallest number, and return it, if that is not above `up_to`."""
        number, order = self.first
        if not self._entries or number > up_to:
            return None
        heapq.heappop(self._entries)
        return self._sequences.pop(order)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is in the heap."""
        self._sequences.pop(sequence.order, None)
        if len(self._entries) > 2 * len(self._sequences) + MAX_EMPTY:
            self._entries = [entry for entry in self._entries if entry[1] in self._sequences]
            heapq.heapify(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __len__(self) -> int:
        return len(self._sequences)


class WaitingQueue:
    """Sequences by priority and by the time they have waited. It also knows the deadlines of all."""

    def __init__(self, max_waiting: int = 0) -> None:
        """`max_waiting` requests may wait beyond those that can have a slot at once; 0 is unlimited."""
        self.num_waiting = 0
        self._num_requests = 0  # that wait with their first sequence: with all of them, that is
        self._max_waiting = max_waiting
        self._arrivals = itertools.count()
        self._heaps = {True: _Heap(), False: _Heap()}  # of interactive sequences, and of bulk ones
        self._deadlines = _Heap()
        self._prompts: PrefixIndex[Sequence] = PrefixIndex()

    def add(self, sequence: Sequence, now: float, num_idle: int = 0) -> None:
        """Add a new sequence; `num_idle` slots are idle. Raises QueueFull.

        The limit is for requests, not for their completions, and never for one that can have a slot at once.
        """
        if self._max_waiting and sequence.index == 0:
            num_others = self.num_waiting - self._num_requests
            num_left = self._num_requests - max(0, num_idle - num_others)  # those that get no slot at once
            if self.num_waiting >= num_idle and num_left >= self._max_waiting:
                raise QueueFull(f"{num_left} requests wait already, max_queue is {self._max_waiting}; try later")
        # Ageing without a clock: all that wait age alike, so the order at arrival stays right.
        sequence.rank = now + AGEING_S * sequence.request.priority
        sequence.order = next(self._arrivals)
        self._begin_to_wait(sequence)
        if sequence.deadline is not None:
            self._deadlines.push(sequence.deadline, sequence)

    def add_preempted(self, sequence: Sequence, now: float) -> None:
        """Add a sequence that lost its slot, as if it had not waited while it had one."""
        sequence.rank = rank_if_preempted(sequence, now)
        self._begin_to_wait(sequence)

    def _begin_to_wait(self, sequence: Sequence) -> None:
        tokens = sequence.tokens if sequence.num_output else sequence.request.prompt  # which is not copied
        self._prompts.insert(sequence, tokens, sequence.scope)
        self.num_waiting += 1
        self._num_requests += sequence.index == 0
        self.requeue(sequence)

    def pop(self, *, interactive: bool = False) -> Sequence | None:
        """Return the next sequence, or the next interactive one; it counts as waiting until `remove`."""
        heap = self._heaps[True] if interactive else min(self._heaps.values(), key=lambda heap: heap.first)
        return heap.pop()

    def requeue(self, sequence: Sequence) -> None:
        """Put a popped sequence back where it was, unless it has ended."""
        if sequence.state is State.WAITING:
            self._heaps[sequence.request.is_interactive].push(sequence.rank, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, which got a slot or has ended."""
        self.num_waiting -= 1
        self._num_requests -= sequence.index == 0
        self._prompts.remove(sequence)
        self._heaps[sequence.request.is_interactive].discard(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Forget the deadline of a sequence that has ended."""
        self._deadlines.discard(sequence)

    def demanded_prefix(self, tokens: tuple[int, ...], scope: Hashable) -> int:
        """Return with how many of these tokens a waiting sequence begins."""
        return self._prompts.longest(tokens, scope)

    def branches(self, sequence: Sequence) -> list[int]:
        """Return the lengths at which other waiting sequences part from this one, or end."""
        return self._prompts.branches(sequence.tokens, sequence.scope, at_least=2)

    def expired(self, now: float) -> Iterator[Sequence]:
        """Yield every unfinished sequence whose deadline has passed, once, waiting or not."""
        while (sequence := self._deadlines.pop(now)) is not None:
            yield sequence

    def waiting(self) -> list[Sequence]:
        """Return all that wait, in no order."""
        return [sequence for heap in self._heaps.values() for sequence in heap]


def rank_if_preempted(sequence: Sequence, now: float) -> float:
    """Return the rank of a running sequence if it waited: only time spent waiting makes it older."""
    return sequence.rank + now - (now if sequence.placed_at is None else sequence.placed_at)

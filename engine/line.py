"""The waiting line of an engine: the most urgent first, but nobody waits for ever. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator

from .errors import QueueFull
from .prefix import PrefixIndex
from .sequence import Sequence, State

AGEING_S = 30.0  # waiting this long counts as much as one step of priority


class WaitingLine:
    """Sequences by priority and by the time they have waited. It also knows everybody's deadline."""

    def __init__(self, max_waiting: int = 0) -> None:
        """`max_waiting` 0 is unlimited."""
        self.num_waiting = 0
        self._max_waiting = max_waiting
        self._arrivals = itertools.count()
        # Heaps hold finished sequences until they come up: removal by state, not by search.
        self._heap: list[tuple[float, int, Sequence]] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._prompts: PrefixIndex[Sequence] = PrefixIndex()

    def join(self, sequence: Sequence, now: float) -> None:
        """A new sequence waits from now on. Raises QueueFull."""
        if self._max_waiting and self.num_waiting >= self._max_waiting:
            raise QueueFull(f"{self.num_waiting} requests wait already, max_queue is {self._max_waiting}; try later")
        # Ageing without a clock: everybody who waits ages alike, so the order at arrival stays right.
        sequence.rank = now + AGEING_S * sequence.request.priority
        sequence.order = next(self._arrivals)
        self._enter(sequence)
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.order, sequence))

    def rejoin(self, sequence: Sequence, now: float) -> None:
        """A sequence that lost its slot waits again, as if it had not waited while it had one."""
        sequence.rank = rank_if_preempted(sequence, now)
        self._enter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        self.num_waiting += 1
        self._prompts.insert(sequence, sequence.tokens, sequence.scope)
        self.put_back(sequence)

    def pop(self) -> Sequence | None:
        """The next sequence. It still counts as waiting until `leave`; None if nobody waits."""
        while self._heap:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.state is State.WAITING:
                return sequence
        return None

    def put_back(self, sequence: Sequence) -> None:
        """A popped sequence goes on waiting in its old place."""
        heapq.heappush(self._heap, (sequence.rank, sequence.order, sequence))

    def leave(self, sequence: Sequence) -> None:
        """One of those who waited does so no more: it got a slot or has ended."""
        self.num_waiting -= 1
        self._prompts.remove(sequence)

    def wanted(self, tokens: tuple[int, ...], scope: Hashable) -> int:
        """How many of these tokens somebody who waits begins with."""
        return self._prompts.longest(tokens, scope)

    def expired(self, now: float) -> Iterator[Sequence]:
        """Every unfinished sequence whose deadline has passed, once, waiting or not."""
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.state is not State.FINISHED:
                yield sequence

    def waiting(self) -> list[Sequence]:
        """Everybody who waits, in no order."""
        return [entry[2] for entry in self._heap if entry[2].state is State.WAITING]


def rank_if_preempted(sequence: Sequence, now: float) -> float:
    """Where a running sequence would stand in the line: only time spent waiting makes it older."""
    return sequence.rank + now - (now if sequence.placed_at is None else sequence.placed_at)

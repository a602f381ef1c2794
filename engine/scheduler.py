"""Who waits, who has a slot, and what the next step decodes. Pure: no llama.cpp, no clock, no threads."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import PromptTooLong, QueueFull
from .sequence import Sequence, State
from .strategies import Share, SlotView, Strategy

AGEING_S = 30.0  # waiting this long counts as much as one step of priority


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one slot in a step's batch."""

    slot: int
    position: int  # of the first token
    tokens: list[int]
    samples: bool  # the next token is sampled after the last one: it needs logits
    decode: bool = False  # one generated token, not a part of the prompt


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler may use. All but `n_slots` and `max_queue` are tokens."""

    n_slots: int
    ctx_per_slot: int
    budget: int
    chunk_size: int
    max_queue: int = 0  # 0 = unlimited


class Scheduler:
    """Owns every sequence from `enqueue` to `release`. Each slot holds one sequence or none."""

    def __init__(self, limits: Limits, strategy: Strategy) -> None:
        self.limits = limits
        self.strategy = strategy
        self.slots: list[Sequence | None] = [None] * limits.n_slots
        self.num_waiting = 0
        self._arrivals = itertools.count()
        # Heaps hold finished sequences until they come up: removal by state, not by search.
        self._waiting: list[tuple[float, int, Sequence]] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []

    def check(self, num_prompt_tokens: int) -> None:
        """Raises PromptTooLong for a prompt that no slot can ever hold."""
        room = self.limits.ctx_per_slot - 1  # one place for the first generated token
        if num_prompt_tokens > room:
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens, a slot holds {room} and the answer; "
                "shorten the prompt, or raise ctx_per_slot"
            )

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a new sequence into the waiting line. Raises PromptTooLong, QueueFull."""
        self.check(sequence.num_prompt)
        if self.limits.max_queue and self.num_waiting >= self.limits.max_queue:
            raise QueueFull(
                f"{self.num_waiting} requests wait already, max_queue is {self.limits.max_queue}; try later"
            )
        order = next(self._arrivals)
        # Ageing without a clock: everybody who waits ages alike, so the order at arrival stays right.
        rank = sequence.submitted_at + AGEING_S * sequence.request.priority
        heapq.heappush(self._waiting, (rank, order, sequence))
        self.num_waiting += 1
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, order, sequence))

    def expired(self, now: float) -> Iterator[Sequence]:
        """Every unfinished sequence whose deadline has passed, once."""
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.state is not State.FINISHED:
                yield sequence

    def admit(self) -> list[Sequence]:
        """Moves sequences from the waiting line into free slots, lowest index first: llama.cpp likes dense ids."""
        admitted = []
        for slot, holder in enumerate(self.slots):
            if holder is not None:
                continue
            sequence = self._next_waiting()
            if sequence is None:
                break
            self.num_waiting -= 1
            self.slots[slot] = sequence
            sequence.slot = slot
            sequence.state = State.PREFILLING
            admitted.append(sequence)
        return admitted

    def _next_waiting(self) -> Sequence | None:
        while self._waiting:
            sequence = heapq.heappop(self._waiting)[2]
            if sequence.state is State.WAITING:
                return sequence
        return None

    def schedule(self) -> list[Chunk]:
        """The batch of this step in order of slots; empty when no slot is busy."""
        views = self._views()
        if not views:
            return []
        shares = self.strategy.build_batch(views, self.limits.budget, self.limits.chunk_size, self.num_waiting)
        self._check_shares(shares, views)
        return [self._chunk(slot, count) for slot, count in sorted(shares)]

    def _views(self) -> list[SlotView]:
        busy = [s for s in self.slots if s is not None]
        busy.sort(key=lambda s: s.admitted_at or 0.0)
        return [_view(s) for s in busy]

    def _check_shares(self, shares: list[Share], views: list[SlotView]) -> None:
        pending = {view.slot: min(view.num_pending, self.limits.chunk_size) for view in views}
        for slot, count in shares:
            allowed = pending.pop(slot, 0)  # a slot named twice has nothing left
            if not 1 <= count <= allowed:
                raise ValueError(f"the batch strategy gave slot {slot} {count} tokens, it may have 1 to {allowed}")
        total = sum(count for _, count in shares)
        if not 1 <= total <= self.limits.budget:
            raise ValueError(f"the batch strategy chose {total} tokens, the budget is {self.limits.budget}")

    def _chunk(self, slot: int, count: int) -> Chunk:
        sequence = self.slots[slot]
        assert sequence is not None
        start = sequence.num_computed
        tokens = sequence.tokens[start : start + count]
        decode = sequence.state is State.DECODING
        return Chunk(slot, start, tokens, samples=count == sequence.num_pending, decode=decode)

    def computed(self, chunk: Chunk) -> Sequence:
        """Accounts a chunk that was decoded; its sequence decodes from now on if it samples."""
        sequence = self.slots[chunk.slot]
        assert sequence is not None
        sequence.num_computed += len(chunk.tokens)
        if chunk.samples:
            sequence.state = State.DECODING
        return sequence

    def is_full(self, sequence: Sequence) -> bool:
        """True when the slot has no room for one more token."""
        return len(sequence.tokens) >= self.limits.ctx_per_slot

    def release(self, sequence: Sequence) -> int | None:
        """Ends a sequence; returns the slot that is free now, None if it had none."""
        if sequence.state is State.WAITING:
            self.num_waiting -= 1
        sequence.state = State.FINISHED
        if sequence.slot is not None:
            self.slots[sequence.slot] = None
        return sequence.slot

    def unfinished(self) -> list[Sequence]:
        """Every sequence that waits or has a slot."""
        waiting = [entry[2] for entry in self._waiting if entry[2].state is State.WAITING]
        return [s for s in self.slots if s is not None] + waiting

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or any(s is not None for s in self.slots)

    @property
    def kv_used_tokens(self) -> int:
        return sum(s.num_computed for s in self.slots if s is not None)


def _view(sequence: Sequence) -> SlotView:
    assert sequence.slot is not None
    decoding = sequence.state is State.DECODING
    return SlotView(sequence.slot, sequence.num_pending, decoding, sequence.request.priority)

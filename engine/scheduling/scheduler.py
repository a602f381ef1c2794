"""Admit and preempt sequences, and build the batch of each step.

A decode call can apply only one set of adapters. If running sequences use several sets, the sets take turns
(docs/adr/004-adapters.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence as Seq
from dataclasses import dataclass

from cellama.engine.backend import Chunk, KvMemory
from cellama.engine.errors import PromptTooLong
from cellama.engine.kvcache.manager import KvCache, Placement

from .admission import CutPlanner, SlotFinder, WaitingQueue
from .decode_costs import DecodeCosts
from .sequence import Sequence, SlotTable, SlotWork, State, work_of
from .shares import FairShares
from .slot_layout import SlotLayout, pass_rows_of
from .strategies import MIN_CHUNK, Guarded, SlotView, Strategy, prefill_order

SLICE_S = 0.1  # seconds of a turn: a switch costs 4 to 9% of it, and the other groups wait that long
BULK_SLICE_S = 0.5  # seconds of a turn while only bulk requests have slots: a switch costs 1 to 2%
BULK_EXTRA_S = 0.3  # seconds that a group with only bulk requests waits longer: about one bulk step


@dataclass(slots=True)
class _AdapterGroup:
    num: int  # number of sequences
    num_interactive: int
    waits_since: float  # start of its wait for a turn

    @property
    def due(self) -> float:
        return self.waits_since if self.num_interactive else self.waits_since + BULK_EXTRA_S


class AdapterRotation:
    """Chooses the adapters of the next step if running sequences use several sets of adapters.

    Running sequences with the same adapters form a group. A group's turn lasts for a time slice, because llama.cpp must
    build a new graph whenever the adapters change. The group that has waited longest gets the next turn. For a group
    without interactive requests, BULK_EXTRA_S is subtracted from its waiting time.
    """

    def __init__(self) -> None:
        self._groups: dict[Hashable, _AdapterGroup] = {}
        self._turn: Hashable = None
        self._since = -math.inf  # start of the turn

    def add(self, key: Hashable, interactive: bool, now: float) -> None:
        """Add a sequence that has received a slot to the group of its adapters."""
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) == 1:  # the single group had its turn until now, so the new one is next
                self._turn, self._since = next(iter(self._groups)), -math.inf
            group = self._groups[key] = _AdapterGroup(0, 0, now)
        group.num += 1
        group.num_interactive += interactive

    def remove(self, key: Hashable, interactive: bool) -> None:
        """Remove a sequence that has finished or lost its slot from the group of its adapters."""
        group = self._groups[key]
        group.num -= 1
        group.num_interactive -= interactive
        if not group.num:
            del self._groups[key]

    @property
    def is_needed(self) -> bool:
        """Return whether the running sequences use more than one set of adapters."""
        return len(self._groups) > 1

    def take_turn(self, now: float) -> Hashable:
        """Return the adapters of the next step. At least one sequence must be running."""
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


RATE_WEIGHT = 0.2  # weight of a new value in the mean prefill rate: about the last ten values count
MAX_PASSED_OVER = 64  # waiting sequences that one search of the queue may skip, so that steps stay short

OnFailure = Callable[[Sequence, Exception], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that apply to each step and to the waiting queue."""

    budget: int  # tokens per step
    chunk_size: int  # prompt tokens per slot and step
    max_queue: int = 0  # requests that wait in addition to those that can have a slot now; 0 = unlimited
    bulk_slots: int = 0  # slots that bulk requests keep, or get first, while interactive ones wait


class Scheduler:
    """Decides which sequences have slots and what each step computes. A slot holds at most one sequence.

    The scheduler owns each sequence from `enqueue` until `release`.
    """

    def __init__(self, limits: Limits, strategy: Strategy, memory: KvMemory, ram_bytes: int = 0) -> None:
        """Create a scheduler.

        `ram_bytes` is the quota for states that are saved in RAM. With 0, no states are saved.
        """
        self.limits = limits
        self.strategy = Guarded(strategy)
        self.slots = SlotTable(memory.n_slots)
        self.shares = FairShares(self.slots)
        self.queue = WaitingQueue(self.shares, limits.max_queue)
        self.cache = KvCache(memory, ram_bytes, self.queue.demanded_prefix)
        self._rotation = AdapterRotation()
        self.finder = SlotFinder(self.cache, self.slots, self.shares, limits.bulk_slots)
        self._cuts = CutPlanner(self.cache, self.queue, self.slots)
        self.costs = strategy.costs = DecodeCosts()
        self.layout = SlotLayout(self.cache, self.slots, self.costs, limits.budget)
        self.num_preemptions = 0
        self._prefill_rate = math.inf  # recent tokens per second in decode calls that prefill prompts

    def check(self, num_prompt_tokens: int) -> None:
        """Raise PromptTooLong if a prompt of this length can never fit into a slot."""
        limit = self.cache.memory.ctx_per_slot - 1  # one cell is reserved for the first generated token
        if num_prompt_tokens > limit:
            raise PromptTooLong(
                # Clients recognise this error by these words. Some read both numbers from the first sentence.
                f"the prompt is too long: {num_prompt_tokens} tokens > {limit} maximum. "
                f"This model's maximum context length is {limit} tokens; shorten the prompt or raise ctx_per_slot"
            )

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """Add a new sequence to the waiting queue. Raises PromptTooLong and QueueFull."""
        self.check(sequence.num_prompt)
        self.queue.add(sequence, now, num_idle=len(self.slots.idle))
        self._cuts.cut_for(sequence)

    # Admission and preemption

    def admit(
        self, now: float, on_failure: OnFailure | None = None, on_late: Callable[[Sequence], None] | None = None
    ) -> list[Sequence]:
        """Assign slots to waiting sequences, the most urgent first, and return the admitted sequences.

        Each admitted sequence reuses the longest available prefix. Sequences of equal urgency take turns by fairness
        key. A sequence is skipped while another sequence is computing a prefix that the skipped sequence can reuse. A
        more urgent sequence may preempt a running sequence. If admitting a sequence raises an unexpected exception, the
        sequence is passed to `on_failure`, which releases it. A sequence that would reach its deadline before its next
        token is passed to `on_late`, which releases it, so that no time is spent on its prompt.
        """
        if not self.num_waiting:
            return []
        if self.queue.has_several_keys:
            self.shares.charge_running()
        admitted: list[Sequence] = []
        passed_over: list[Sequence] = []
        is_full = False  # then only interactive sequences can still get a slot, by preempting a bulk sequence
        while len(passed_over) < MAX_PASSED_OVER and (sequence := self._next_waiting(is_full)) is not None:
            try:
                if on_late is not None and self._is_too_late(sequence, now):
                    on_late(sequence)
                    continue
                is_waiting = self.finder.await_prefix(sequence, now)
                sequence.note_prefix_wait(is_waiting, now)
                if is_waiting:
                    passed_over.append(sequence)
                    continue
                placement = self._find_slot(sequence, now)
                if placement is None:
                    passed_over.append(sequence)
                    if is_full or sequence.request.is_interactive or self.cache.memory.unified:
                        break  # in one pool, other sequences would use the cells that this one waits for
                    is_full = True
                    continue
                self._assign_slot(sequence, placement, now)
            except Exception as error:
                if on_failure is None:
                    raise
                on_failure(sequence, error)
            else:
                admitted.append(sequence)
        for sequence in passed_over:
            self.queue.requeue(sequence)
        # A sequence may have lost its slot again: to a more urgent one, or because its request failed.
        return [sequence for sequence in admitted if sequence.slot is not None]

    def _next_waiting(self, is_full: bool) -> Sequence | None:
        """Return the next sequence in the queue.

        If a slot is idle and bulk sequences have fewer slots than guaranteed, the next bulk sequence precedes all
        others.
        """
        guaranteed = self.limits.bulk_slots
        if guaranteed and self.slots.idle and self.slots.num_bulk < guaranteed:
            bulk = self.queue.pop(only="bulk")
            if bulk is not None:
                return bulk
        return self.queue.pop(only="interactive" if is_full else None)

    def _is_too_late(self, sequence: Sequence, now: float) -> bool:
        """Return whether the sequence's prefill would take until after its deadline."""
        if sequence.deadline is None:
            return False
        num_possible = (sequence.deadline - now) * self._prefill_rate
        if len(sequence.tokens) <= num_possible:
            return False
        return len(sequence.tokens) - self.cache.longest_prefix(sequence.tokens, sequence.scope) > num_possible

    def _find_slot(self, sequence: Sequence, now: float) -> Placement | None:
        """Return a slot for the sequence, or None if it must wait.

        Running sequences are preempted if that frees enough space.
        """
        while True:
            idle = self.slots.idle
            if idle and (placement := self.finder.find_slot(sequence, idle)) is not None:
                return placement
            victims = self.finder.victims(sequence, now)
            if not victims or not self.finder.would_fit(sequence, idle, victims):
                return None
            self.preempt(victims[0], now)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take the slot from a sequence and return the sequence to the waiting queue.

        The sequence's cells are saved to RAM if they fit into the quota.
        """
        self.shares.charge(sequence, is_leaving=True)
        slot = self.slots.release(sequence)
        self.cache.save(slot, sequence.tokens[: sequence.num_computed], sequence.scope)
        self.cache.clear(slot)
        self._rotation.remove(sequence.adapters, sequence.request.is_interactive)
        sequence.num_computed, sequence.state = 0, State.WAITING
        self.queue.add_preempted(sequence, now)
        self.num_preemptions += 1

    def _assign_slot(self, sequence: Sequence, placement: Placement, now: float) -> None:
        self._cuts.plan(sequence, placement.num_tokens)
        tier = placement.tier  # read before the prefix is moved
        try:
            sequence.num_computed = self.cache.assign_slot(placement, sequence.tokens, sequence.scope)
        except Exception:
            self.cache.wipe(placement.slot)
            raise
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            # The reused prefix of a resumed sequence may include output.
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            sequence.cache_tier = tier if sequence.num_cached else None
        sequence.placed_at, sequence.num_output_placed = now, sequence.num_output
        sequence.num_reused, sequence.charged = sequence.num_computed, 0.0
        sequence.state, sequence.waits_for = State.PREFILLING, None
        self.slots.assign(placement.slot, sequence)
        self._rotation.add(sequence.adapters, sequence.request.is_interactive, now)
        self.queue.remove(sequence)
        self.shares.charge(sequence)

    # The batch of a step

    def schedule(self, now: float, only: int | None = None) -> list[SlotWork]:
        """Return the sequences and chunks of this step, in slot order. All of these sequences use the same adapters.

        The result is empty if no slot is busy. If there are not enough cells, idle slots are emptied first. After that,
        running sequences are preempted one by one. If `only` is given, the step computes only that slot.
        """
        while True:
            works = self._build_batch(now, only)
            if not self.cache.memory.unified:  # each slot has its own cells
                return works
            missing = sum([len(chunk.tokens) for _, chunk in works]) - self.cache.cells.free
            if missing <= 0 or not self.free_cells(missing, now):
                return works

    def free_cells(self, missing: int, now: float) -> bool:
        """Free cells for running sequences.

        Return False if the only running sequence already occupies all cells.
        """
        idle = [slot for slot in self.slots.idle if self.cache.cells.of(slot)]
        freed = self.cache.cells.freed_by(idle)
        if freed:
            return self.cache.reclaim(idle, min(missing, freed))
        running = self.slots.running
        if len(running) < 2:
            return False
        self.preempt(self.finder.preemption_order(running)[0], now)
        return True

    @property
    def only_decodes(self) -> bool:
        """Whether all running sequences decode, and are either all interactive or all bulk."""
        if not self.slots.has_one_class:
            return False
        for sequence in self.slots.running:  # a loop, because this runs several times per step
            if sequence.state is not State.DECODING:
                return False
        return bool(self.slots.running)

    def _build_batch(self, now: float, only: int | None) -> list[SlotWork]:
        running = self.slots.running
        if (
            only is None
            and self.only_decodes
            and len(running) <= self.limits.budget
            and not self._rotation.is_needed
            and not (self.slots.has_protected and len(running) > 1)
            and self.strategy.decodes_all(is_interactive=not self.slots.num_bulk)
        ):
            return [work_of(sequence, 1) for sequence in running]
        views = self._views(now) if only is None else [_view(s) for s in [self.slots[only]] if s is not None]
        if not views:
            return []
        allocations = self.strategy.build_batch(views, self.limits.budget, self.limits.chunk_size, self.num_waiting)
        return [work_of(s, count) for slot, count in sorted(allocations) if (s := self.slots[slot]) is not None]

    def _views(self, now: float) -> list[SlotView]:
        busy = self.slots.running
        if self._rotation.is_needed:
            turn = self._rotation.take_turn(now)
            busy = [s for s in busy if s.adapters == turn]
        return [_view(s) for s in sorted(busy, key=prefill_order)]

    def observe_decode(self, chunks: Seq[Chunk], seconds: float) -> None:
        """Learn from the duration of a decode call with these chunks."""
        num_tokens = sum([len(chunk.tokens) for chunk in chunks])
        if num_tokens >= MIN_CHUNK + len(chunks) and seconds > 0:
            rate = num_tokens / seconds
            known = self._prefill_rate
            self._prefill_rate = rate if math.isinf(known) else known + (rate - known) * RATE_WEIGHT
        if all(chunk.decode or len(chunk.tokens) == 1 for chunk in chunks):
            self.costs.observe(pass_rows_of(chunks, unified=self.cache.memory.unified), seconds)

    def commit(self, work: SlotWork) -> None:
        """Record a decoded chunk without its draft tokens.

        If the next token is sampled after this chunk, the sequence starts decoding.
        """
        sequence, chunk = work
        count = 1 if chunk.decode else len(chunk.tokens)
        sequence.num_computed += count
        self.cache.extend(chunk.slot, count)
        if sequence.num_computed in sequence.cuts:
            self.cache.take_checkpoint(chunk.slot)
        if chunk.samples:
            sequence.state = State.DECODING

    def rollback(self, work: SlotWork) -> None:
        """Restore a slot to its state before a failed chunk, or empty the slot if its memory can't be truncated."""
        sequence, chunk = work
        if sequence.slot == chunk.slot:  # otherwise it has lost the slot
            self._truncate(sequence, chunk.slot, chunk.position)

    def settle(self) -> None:
        """Restore every slot to the recorded state of its sequence after a step has raised an exception."""
        for slot, sequence in enumerate(self.slots):
            if sequence is None:
                self.layout.restore_slot(slot)
                continue
            self._truncate(sequence, slot, min(sequence.num_computed, len(sequence.tokens) - 1))
            if self.cache.cells.of(slot) != sequence.num_computed:  # the content of the slot is unknown
                self._truncate(sequence, slot, 0)

    def _truncate(self, sequence: Sequence, slot: int, num_tokens: int) -> None:
        sequence.truncate(self.cache.truncate(slot, num_tokens))

    # Finishing

    def is_full(self, sequence: Sequence) -> bool:
        """Return whether the sequence's slot is full."""
        return len(sequence.tokens) >= self.cache.memory.ctx_per_slot

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Finish a sequence and release its slot.

        If `keep` is true and the request allows it, the sequence's cells are kept for later sequences.
        """
        if sequence.state is State.WAITING:
            self.queue.remove(sequence)
        self.queue.forget(sequence)
        self.layout.observe_end(sequence)
        sequence.state = State.FINISHED
        if not sequence.request.cache_prompt:
            self.cache.forget_scope(sequence.scope)
        if sequence.slot is None:
            return
        self.shares.charge(sequence, is_leaving=True)
        slot = self.slots.release(sequence)
        self._rotation.remove(sequence.adapters, sequence.request.is_interactive)
        if keep and sequence.request.cache_prompt:
            committed = sequence.tokens[: sequence.num_computed]
            self.cache.retire(slot, committed, sequence.scope, save=sequence.is_reusable, note=sequence.note)
        else:
            self.cache.clear(slot)

    def unfinished(self) -> list[Sequence]:
        """Return all sequences that are waiting or have a slot."""
        return self.slots.running + self.queue.waiting()

    @property
    def num_waiting(self) -> int:
        return self.queue.num_waiting

    @property
    def num_busy(self) -> int:
        """The number of busy slots."""
        return len(self.slots.running)

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or bool(self.slots.running)

    @property
    def kv_used_tokens(self) -> int:
        """The total number of computed tokens in running sequences."""
        return sum(s.num_computed for s in self.slots.running)

    @property
    def kv_cached_tokens(self) -> int:
        """The total number of tokens in idle slots, which later sequences with the same prefix can reuse."""
        return sum(self.cache.cells.of(slot) for slot in self.slots.idle)


def _view(sequence: Sequence) -> SlotView:
    assert sequence.slot is not None
    decoding = sequence.state is State.DECODING
    return SlotView(sequence.slot, sequence.num_until_cut, decoding, sequence.request.priority)

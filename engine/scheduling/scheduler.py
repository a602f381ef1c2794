"""Admission, preemption and the batch of each step. Pure: no llama.cpp, no clock, no threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from cellama.engine.backend import Chunk, KvMemory
from cellama.engine.errors import PromptTooLong
from cellama.engine.kvcache.manager import KvCache, Placement

from .adapter_rotation import Rotation
from .bulk_policy import prefill_order
from .cuts import CutPlanner
from .decode_costs import DecodeCosts, pass_rows_of
from .placement import SlotFinder, expendable
from .sequence import Sequence, SlotWork, State, work_of
from .slot_layout import SlotLayout
from .slots import SlotTable
from .strategies import SlotView, Strategy
from .strategy_registry import Guarded
from .waiting_queue import WaitingQueue

MAX_PASSED_OVER = 64  # sequences that wait for a prefix, beyond which the queue is not searched: a step stays short

OnFailure = Callable[[Sequence, Exception], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and the waiting queue may hold."""

    budget: int  # tokens of a step
    chunk_size: int  # prompt tokens of one slot in a step
    max_queue: int = 0  # requests that can't have a slot at once; 0 = unlimited


class Scheduler:
    """Owns every sequence from `enqueue` to `release`. Each slot holds one sequence or none."""

    def __init__(self, limits: Limits, strategy: Strategy, memory: KvMemory, ram_bytes: int = 0) -> None:
        """`ram_bytes` is the quota of states that are saved in RAM; 0 saves nothing."""
        self.limits = limits
        self.strategy = Guarded(strategy)
        self.slots = SlotTable(memory.n_slots)
        self.queue = WaitingQueue(limits.max_queue)
        self.cache = KvCache(memory, ram_bytes, self.queue.demanded_prefix)
        self._rotation = Rotation()
        self.finder = SlotFinder(self.cache, self.slots)
        self._cuts = CutPlanner(self.cache, self.queue, self.slots)
        self.costs = DecodeCosts()
        self.layout = SlotLayout(self.cache, self.slots, self.costs, limits.budget)
        self.num_preemptions = 0

    def check(self, num_prompt_tokens: int) -> None:
        """Raise PromptTooLong for a prompt that no slot can ever hold."""
        most = self.cache.memory.ctx_per_slot - 1  # one cell is for the first generated token
        if num_prompt_tokens > most:
            raise PromptTooLong(
                f"the prompt has {num_prompt_tokens} tokens, a slot holds {most} and the answer; "
                "shorten the prompt, or raise ctx_per_slot"
            )

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """Put a new sequence into the waiting queue. Raises PromptTooLong, QueueFull."""
        self.check(sequence.num_prompt)
        self.queue.add(sequence, now, num_idle=len(self.slots.idle))
        self._cuts.cut_for(sequence)

    # Admission and preemption

    def admit(self, now: float, on_failure: OnFailure | None = None) -> list[Sequence]:
        """Give slots to waiting sequences, the most urgent first, each with the longest prefix that there is.

        A sequence whose prefix another one is computing right now is passed over until that is done. A running
        sequence loses its slot to a more urgent one. A sequence for which this raises an unforeseen exception is passed
        to `on_failure`, which releases it.
        """
        admitted: list[Sequence] = []
        passed_over: list[Sequence] = []
        is_full = False  # only interactive sequences can still get a slot: that of a bulk one
        while len(passed_over) < MAX_PASSED_OVER and (sequence := self.queue.pop(interactive=is_full)) is not None:
            try:
                is_held = self.finder.await_prefix(sequence, now)
                sequence.note_prefix_wait(is_held, now)
                if is_held:
                    passed_over.append(sequence)
                    continue
                placement = self._find_slot(sequence, now)
                if placement is None:
                    passed_over.append(sequence)
                    if is_full or sequence.request.is_interactive or self.cache.memory.unified:
                        break  # in one pool others would use up the cells that it waits for
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
        # One may have lost its slot again: to a more urgent one, or because another one of its request failed.
        return [sequence for sequence in admitted if sequence.slot is not None]

    def _find_slot(self, sequence: Sequence, now: float) -> Placement | None:
        """Return a slot for the sequence, for which others may lose theirs; None, and none does, if it must wait."""
        while True:
            idle = self.slots.idle
            if idle and (placement := self.finder.find_slot(sequence, idle)) is not None:
                return placement
            victims = self.finder.victims(sequence, now)
            if not victims or not self.finder.would_fit(sequence, idle, victims):
                return None
            self.preempt(victims[0], now)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Take its slot away from a sequence, which waits again, with its cells saved if the quota allows that."""
        slot = self.slots.release(sequence)
        self.cache.save(slot, sequence.tokens[: sequence.num_computed], sequence.scope)
        self.cache.clear(slot)
        self._rotation.remove(sequence.adapters, sequence.request.is_interactive)
        sequence.num_computed, sequence.state = 0, State.WAITING
        self.queue.add_preempted(sequence, now)
        self.num_preemptions += 1

    def _assign_slot(self, sequence: Sequence, placement: Placement, now: float) -> None:
        self._cuts.plan(sequence, placement.num_tokens)
        tier = placement.tier  # before it is moved
        try:
            sequence.num_computed = self.cache.assign_slot(placement, sequence.tokens, sequence.scope)
        except Exception:
            self.cache.wipe(placement.slot)
            raise
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            # Of a resumed one output may be in the cache, too.
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            sequence.cache_tier = tier if sequence.num_cached else None
        sequence.placed_at, sequence.num_output_placed = now, sequence.num_output
        sequence.state, sequence.waits_for = State.PREFILLING, None
        self.slots.assign(placement.slot, sequence)
        self._rotation.add(sequence.adapters, sequence.request.is_interactive, now)
        self.queue.remove(sequence)

    # The batch of a step

    def schedule(self, now: float, only: int | None = None) -> list[SlotWork]:
        """Return the work of this step in order of slots, all with the same adapters; empty when no slot is busy.

        When the cells do not suffice for it, idle slots are emptied; then one running sequence after another waits.
        With `only` it is for this slot alone.
        """
        while True:
            works = self._build_batch(now, only)
            if not self.cache.memory.unified:  # each slot has its own cells
                return works
            missing = sum([len(chunk.tokens) for _, chunk in works]) - self.cache.cells.free
            if missing <= 0 or not self.free_cells(missing, now):
                return works

    def free_cells(self, missing: int, now: float) -> bool:
        """Free cells for running sequences; False when only one is left, which has them all."""
        idle = [slot for slot in self.slots.idle if self.cache.cells.of(slot)]
        freed = self.cache.cells.freed_by(idle)
        if freed:
            return self.cache.reclaim(idle, min(missing, freed))
        running = self.slots.running
        if len(running) < 2:
            return False
        self.preempt(max(running, key=expendable), now)
        return True

    def _build_batch(self, now: float, only: int | None) -> list[SlotWork]:
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
        busy.sort(key=prefill_order)
        return [_view(s) for s in busy]

    def observe_decode(self, chunks: Seq[Chunk], seconds: float) -> None:
        """Learn what a decode call of these chunks took, unless prompts were prefilled in it."""
        if all(chunk.decode or len(chunk.tokens) == 1 for chunk in chunks):
            self.costs.observe(pass_rows_of(chunks, unified=self.cache.memory.unified), seconds)

    def commit(self, work: SlotWork) -> None:
        """Account a chunk that was decoded, except for drafts; its sequence decodes from now on if it samples."""
        sequence, chunk = work
        count = 1 if chunk.decode else len(chunk.tokens)
        sequence.num_computed += count
        self.cache.extend(chunk.slot, count)
        if sequence.num_computed in sequence.cuts:
            self.cache.take_checkpoint(chunk.slot)
        if chunk.samples:
            sequence.state = State.DECODING

    def rollback(self, work: SlotWork) -> None:
        """Put a slot back to where it was before a chunk that failed; to its start where that can't be done."""
        sequence, chunk = work
        if sequence.slot == chunk.slot:  # else it has lost it
            self._cut_back(sequence, chunk.slot, chunk.position)

    def settle(self) -> None:
        """Put every slot back to what its sequence has accounted, after a step that raised anywhere."""
        for slot, sequence in enumerate(self.slots):
            if sequence is None:
                self.layout.restore_slot(slot)
                continue
            self._cut_back(sequence, slot, min(sequence.num_computed, len(sequence.tokens) - 1))
            if self.cache.cells.of(slot) != sequence.num_computed:  # what it holds is unknown
                self._cut_back(sequence, slot, 0)

    def _cut_back(self, sequence: Sequence, slot: int, num_tokens: int) -> None:
        sequence.cut_back(self.cache.truncate(slot, num_tokens))

    # The end

    def is_full(self, sequence: Sequence) -> bool:
        """True when the slot has no free cell left."""
        return len(sequence.tokens) >= self.cache.memory.ctx_per_slot

    def release(self, sequence: Sequence, *, keep: bool = True) -> None:
        """End a sequence. With `keep`, and if its request allows it, its cells are kept for another one."""
        if sequence.state is State.WAITING:
            self.queue.remove(sequence)
        self.queue.forget(sequence)
        self.layout.observe_end(sequence)
        sequence.state = State.FINISHED
        if not sequence.request.cache_prompt:
            self.cache.forget_scope(sequence.scope)
        if sequence.slot is None:
            return
        slot = self.slots.release(sequence)
        self._rotation.remove(sequence.adapters, sequence.request.is_interactive)
        if keep and sequence.request.cache_prompt:
            committed = sequence.tokens[: sequence.num_computed]
            self.cache.retire(slot, committed, sequence.scope, save=sequence.is_worth_keeping, note=sequence.note)
        else:
            self.cache.clear(slot)

    def unfinished(self) -> list[Sequence]:
        """Return every sequence that waits or has a slot."""
        return self.slots.running + self.queue.waiting()

    @property
    def num_waiting(self) -> int:
        return self.queue.num_waiting

    @property
    def num_busy(self) -> int:
        """Slots that have a sequence."""
        return len(self.slots.running)

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or bool(self.slots.running)

    @property
    def kv_used_tokens(self) -> int:
        """Positions of running sequences."""
        return sum(s.num_computed for s in self.slots.running)

    @property
    def kv_cached_tokens(self) -> int:
        """Positions in idle slots, kept for sequences that start with the same tokens."""
        return sum(self.cache.cells.of(slot) for slot in self.slots.idle)


def _view(sequence: Sequence) -> SlotView:
    assert sequence.slot is not None
    decoding = sequence.state is State.DECODING
    return SlotView(sequence.slot, sequence.num_until_cut, decoding, sequence.request.priority)

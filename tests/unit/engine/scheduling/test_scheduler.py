"""The scheduler loses no slot, respects the budget, and starves no request."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cellama.engine import PromptTooLong, QueueFull, Request, Share
from cellama.engine.core.telemetry import timings_of
from cellama.engine.fake import FakeBackend
from cellama.engine.scheduling.scheduler import Limits
from cellama.engine.scheduling.sequence import Sequence, State
from cellama.engine.scheduling.strategies import (
    BULK_PATIENCE_S,
    MIN_CHUNK,
    STRATEGIES,
    DecodeMaximal,
    Strategy,
    TokenAllocation,
    make_strategy,
)

from ....conftest import EXAMPLES
from .schedulers import new_scheduler, run_step, sequence


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, steps, fails, preempts and ends in any order, in every kind of memory."""

    LIMITS = Limits(budget=64, chunk_size=40)

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Sequence] = []
        self.now = 0.0

    @initialize(
        unified=st.booleans(),
        partial_reuse=st.booleans(),
        window=st.sampled_from([0, 20]),
        n_cells=st.integers(250, 750),
        ram_bytes=st.sampled_from([0, 300, 10_000]),
        strategy=st.sampled_from(sorted(STRATEGIES)),
        n_slots=st.sampled_from([3, 7]),
        pass_s=st.sampled_from([0.1, 1.0, 10.0]),
    )
    def begin(
        self,
        unified: bool,
        partial_reuse: bool,
        window: int,
        n_cells: int,
        ram_bytes: int,
        strategy: str,
        n_slots: int,
        pass_s: float,
    ) -> None:
        self.pass_s = pass_s
        self.scheduler = new_scheduler(
            make_strategy(strategy),
            self.LIMITS,
            ram_bytes=ram_bytes,
            ctx_per_slot=250,
            unified=unified,
            partial_reuse=partial_reuse,
            window=window if partial_reuse else 0,
            n_cells=n_cells if unified else 0,
            n_slots=n_slots,
        )

    @rule(lengths=st.lists(st.integers(1, 240), max_size=4), priority=st.integers(0, 9), family=st.integers(0, 2))
    def submit(self, lengths: list[int], priority: int, family: int) -> None:
        for length in lengths:
            tokens = (family, *range(1, length))  # prompts of a family share prefixes
            share = Share(("", "a", "a/b")[length % 3])
            request = Request("r", tokens, priority=priority, cache_prompt=length % 8 != 0, share=share)
            new = Sequence(request, seed=0, submitted_at=self.now, tokens=list(tokens))
            self.scheduler.enqueue(new, self.now)
            self.alive.append(new)

    @rule(count=st.integers(1, 30), elapsed_s=st.sampled_from([0.1, 20.0]))
    def steps(self, count: int, elapsed_s: float) -> None:
        for _ in range(count):
            self.step(elapsed_s)
            self.slots_and_cells_are_conserved()

    def step(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        chunks = run_step(self.scheduler, self.now, pass_s=self.pass_s)
        assert sum(len(chunk.tokens) for chunk in chunks) <= self.LIMITS.budget
        assert all(len(chunk.tokens) <= self.LIMITS.chunk_size for chunk in chunks)
        assert [chunk.slot for chunk in chunks] == sorted({chunk.slot for chunk in chunks})
        assert bool(chunks) == bool(self.alive)
        if isinstance(self.scheduler.strategy.strategy, DecodeMaximal):
            decoding = {s.slot for s in self.alive if s.state is State.DECODING}
            assert decoding <= {chunk.slot for chunk in chunks if chunk.samples}
        self.alive = [s for s in self.alive if s.state is not State.FINISHED]

    @rule()
    def fail_a_step(self) -> None:
        self.scheduler.admit(self.now)
        for work in self.scheduler.schedule(self.now):
            self.scheduler.rollback(work)

    @rule(slot=st.integers(0, 2))
    def lose_what_a_window_passed(self, slot: int) -> None:
        backend = self.scheduler.cache.memory
        assert isinstance(backend, FakeBackend)
        backend.lose_what_the_window_passed(slot)

    @rule(index=st.integers(0, 100))
    def preempt(self, index: int) -> None:
        running = [s for s in self.alive if s.slot is not None]
        if running:
            self.scheduler.preempt(running[index % len(running)], self.now)

    @rule(index=st.integers(0, 100), keep=st.booleans())
    def end(self, index: int, keep: bool) -> None:
        if self.alive:
            ended = self.alive.pop(index % len(self.alive))
            self.scheduler.release(ended, keep=keep)

    @invariant()
    def slots_and_cells_are_conserved(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler, backend = self.scheduler, self.scheduler.cache.memory
        assert isinstance(backend, FakeBackend)
        held = [s for s in self.alive if s.slot is not None]
        assert [s for s in scheduler.slots if s is not None] == sorted(held, key=lambda s: s.slot or 0)
        assert scheduler.num_waiting == sum(1 for s in self.alive if s.state is State.WAITING)
        assert sorted(map(id, scheduler.unfinished())) == sorted(map(id, self.alive))
        assert all(s.num_computed == len(backend.cells[s.slot or 0]) for s in held)
        assert [scheduler.cache.cells.of(slot) for slot in range(backend.n_slots)] == [
            len(cells) for cells in backend.cells
        ]
        assert scheduler.cache.cells.used == backend.num_used() <= backend.n_cells
        for s in held:  # the reused tokens equal those that would have been computed
            assert [cell.token for cell in backend.cells[s.slot or 0]] == s.tokens[: s.num_computed]

    @invariant()
    def shares_count_waiting_sequences(self) -> None:
        if hasattr(self, "scheduler"):
            waiting = Counter((s.request.priority, f"{s.request.share.key}/") for s in self.scheduler.queue.waiting())
            bands = self.scheduler.shares._bands.items()
            assert waiting == {
                (priority, f"{key}/"): num
                for priority, band in bands
                for key in ("", "a", "a/b")
                if (num := band.num_waiting[f"{key}/"])
            }
            assert all(s.charged == 0 for s in self.alive if s.admitted_at is None)

    @invariant()
    def saved_states_keep_to_the_quota(self) -> None:
        if hasattr(self, "scheduler"):
            cache = self.scheduler.cache
            checkpoints = cache.checkpoints
            held = {c for of_one in checkpoints._of.values() for c in of_one.values()}
            assert held == set(checkpoints._all)
            assert checkpoints.used_bytes == sum(c.data.nbytes for c in held) <= checkpoints.quota_bytes
            assert set(checkpoints._of) <= {*range(len(self.scheduler.slots)), *cache.ram._states}
            assert cache.ram.used_bytes == sum(state.num_bytes for state in cache.ram._states) <= cache.ram.quota_bytes


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100 * EXAMPLES, stateful_step_count=30, deadline=None)


def test_scheduler_rejects_a_prompt_that_does_not_fit_into_a_slot() -> None:
    scheduler = new_scheduler()
    scheduler.enqueue(sequence(39), 0)
    with pytest.raises(PromptTooLong, match=r"40 tokens > 39 maximum\. .* raise ctx_per_slot"):
        scheduler.enqueue(sequence(40), 0)


def test_scheduler_rejects_more_than_max_queue_requests() -> None:
    scheduler = new_scheduler(limits=Limits(8, 4, max_queue=2), n_slots=3)
    for _ in range(5):  # three of them get slots
        scheduler.enqueue(sequence(), 0)
    with pytest.raises(QueueFull, match="the limit is 2"):
        scheduler.enqueue(sequence(), 0)


def test_scheduler_admits_urgent_sequences_first_but_ages_the_other_sequences() -> None:
    scheduler = new_scheduler(n_slots=1)
    old_bulk, bulk, urgent = sequence(priority=9), sequence(priority=9), sequence(priority=0)
    for waiting, at in ((bulk, 280), (urgent, 300), (old_bulk, 0)):
        scheduler.enqueue(waiting, at)
    order = []
    for _ in range(3):
        order += scheduler.admit(301)
        scheduler.release(order[-1])
    assert order == [old_bulk, urgent, bulk]


def test_scheduler_expires_waiting_and_running_sequences_once() -> None:
    scheduler = new_scheduler(n_slots=1)
    running, waiting, patient = sequence(timeout_s=1), sequence(timeout_s=2), sequence()
    for new in (running, waiting, patient):
        scheduler.enqueue(new, 0)
    scheduler.admit(0)
    assert list(scheduler.queue.expired(0.5)) == []
    assert list(scheduler.queue.expired(3.0)) == [running, waiting]
    assert list(scheduler.queue.expired(3.0)) == []


@pytest.mark.parametrize(
    "shares", [[(0, 9)], [(0, 5)], [(0, 0)], [(0, 1), (0, 1)], [(2, 1)], [], [(0, 1.5)], [0], None]
)
def test_scheduler_replaces_an_invalid_batch_from_a_strategy(shares: list[TokenAllocation]) -> None:
    class Wrong(Strategy):
        def build_batch(self, slots: object, budget: int, chunk_size: int, queue_depth: int) -> list[TokenAllocation]:
            return shares

    scheduler = new_scheduler(Wrong())
    scheduler.enqueue(sequence(20), 0)
    scheduler.admit(0)
    assert [len(work.chunk.tokens) for work in scheduler.schedule(0)] == [4]
    assert scheduler.strategy.num_failures == 1


def test_finished_sequences_are_forgotten_before_their_deadlines() -> None:
    scheduler = new_scheduler(n_slots=1)
    for index in range(200):
        ended = sequence(timeout_s=10**6, priority=index % 10)
        scheduler.enqueue(ended, 0)
        scheduler.release(ended)
    assert scheduler.queue._heaps == {}
    assert list(scheduler.queue._deadlines) == []
    assert len(scheduler.queue._deadlines._entries) < 50
    patient = sequence(timeout_s=1)
    scheduler.enqueue(patient, 0)
    assert scheduler.queue.waiting() == [patient]
    assert list(scheduler.queue.expired(2)) == [patient]


@pytest.mark.parametrize("partial_reuse", [False, True])
def test_sibling_sequences_are_admitted_together_when_they_can_reuse_nothing(partial_reuse: bool) -> None:
    scheduler = new_scheduler(n_slots=3, ctx_per_slot=250, partial_reuse=partial_reuse)
    siblings = [Request("r", (*range(1, 150), 200 + i)) for i in range(3)]
    for request in siblings:
        scheduler.enqueue(Sequence(request, 0, 0.0, list(request.prompt)), 0)
    assert len(scheduler.admit(0)) == (1 if partial_reuse else 3)


def test_sequence_records_its_waits_for_a_prefix_and_for_a_slot() -> None:
    scheduler = new_scheduler(n_slots=2, ctx_per_slot=250, n_batch=200, limits=Limits(200, 200))
    siblings = [Request("r", (*range(1, 150), 200 + i)) for i in range(3)]
    first, second, third = (Sequence(request, 0, 1.0, list(request.prompt), received_at=4.0) for request in siblings)
    for each in (first, second, third):
        scheduler.enqueue(each, 4)
    scheduler.admit(5)
    while first.state is State.PREFILLING:
        run_step(scheduler, now=6)
    assert scheduler.admit(7) == [second]
    scheduler.release(first)
    assert scheduler.admit(10) == [third]
    timings = [timings_of(each, 20) for each in (first, second, third)]
    assert [t.delivery_ms for t in timings] == [3000] * 3
    assert [t.prefix_wait_ms for t in timings] == [0, 2000, 2000]
    assert [t.queue_ms for t in timings] == [4000, 6000, 9000]


def test_prompt_waits_for_the_prompt_that_it_continues_for_every_memory_type() -> None:
    scheduler = new_scheduler(n_slots=3, ctx_per_slot=250, partial_reuse=False, n_batch=200, limits=Limits(200, 200))
    for length in (100, 150):
        scheduler.enqueue(sequence(length), 0)
    first = scheduler.admit(0)
    assert [s.num_prompt for s in first] == [100]
    while first[0].state is State.PREFILLING:
        run_step(scheduler)
    (second,) = scheduler.admit(0)
    assert (second.num_prompt, second.num_cached) == (150, 100)


def test_sequence_is_not_preempted_when_the_new_sequence_would_still_not_fit() -> None:
    scheduler = new_scheduler(
        n_slots=4, ctx_per_slot=200, unified=True, n_cells=220, n_batch=200, limits=Limits(200, 200)
    )
    interactive, *bulk = (sequence(length, priority) for length, priority in ((100, 3), (30, 9), (30, 9)))
    scheduler.enqueue(interactive, 0)
    run_step(scheduler)
    for each in bulk:
        scheduler.enqueue(Sequence(each.request, 0, 0.0, [7, *each.tokens[1:]]), 0)
    while scheduler.num_waiting or any(s is not None and s.state is State.PREFILLING for s in scheduler.slots):
        run_step(scheduler)
    urgent = Request("u", tuple(range(50, 230)), priority=3)
    scheduler.enqueue(Sequence(urgent, 0, 0.0, list(urgent.prompt)), 1)
    assert scheduler.admit(1) == []
    assert scheduler.num_preemptions == 0
    scheduler.release(interactive)
    interactive.slot = None
    assert [s.request.id for s in scheduler.admit(1)] == ["u"]
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize(("later_s", "first"), [(1.0, 3), (BULK_PATIENCE_S + 1, 9)])
def test_interactive_prompt_is_prefilled_first_unless_bulk_prompts_are_much_older(later_s: float, first: int) -> None:
    scheduler = new_scheduler(limits=Limits(budget=MIN_CHUNK, chunk_size=MIN_CHUNK), n_slots=3, ctx_per_slot=500)
    for now, priority in ((0.0, 9), (0.1, 9), (later_s, 3)):
        scheduler.enqueue(sequence(400, priority=priority, cache_prompt=False), now)
        scheduler.admit(now)
    ((_, chunk),) = scheduler.schedule(later_s)
    owner = scheduler.slots[chunk.slot]
    assert owner is not None
    assert owner.request.priority == first

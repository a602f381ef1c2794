"""The scheduler conserves slots, keeps to the budget and starves nobody."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cellama.engine import InvalidRequest, PromptTooLong, QueueFull, Request
from cellama.engine.scheduler import Chunk, Limits, Scheduler
from cellama.engine.sequence import Sequence, State
from cellama.engine.strategies import (
    MIN_CHUNK,
    STRATEGIES,
    DecodeMaximal,
    Share,
    SlotView,
    equal_chunks,
    make_strategy,
)

LIMITS = Limits(n_slots=3, ctx_per_slot=40, budget=8, chunk_size=4)


def sequence(num_prompt: int = 5, priority: int = 3, at: float = 0.0, timeout_s: float | None = None) -> Sequence:
    request = Request("r", tuple(range(num_prompt)), priority=priority, timeout_s=timeout_s)
    return Sequence(request, seed=0, submitted_at=at, tokens=list(request.prompt))


def run_step(scheduler: Scheduler) -> list[Chunk]:
    """One step as the engine does it, each sampled token being 7."""
    scheduler.admit()
    chunks = scheduler.schedule()
    for chunk in chunks:
        owner = scheduler.computed(chunk)
        if chunk.samples:
            owner.tokens.append(7)
            if scheduler.is_full(owner):
                scheduler.release(owner)
    return chunks


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of submitting, stepping and ending."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(LIMITS, DecodeMaximal())
        self.alive: list[Sequence] = []

    @rule(num_prompt=st.integers(1, 30), priority=st.integers(0, 9))
    def submit(self, num_prompt: int, priority: int) -> None:
        new = sequence(num_prompt, priority)
        self.scheduler.enqueue(new)
        self.alive.append(new)

    @rule()
    def step(self) -> None:
        self.scheduler.admit()
        decoding = {s.slot for s in self.alive if s.state is State.DECODING}
        chunks = run_step(self.scheduler)
        assert sum(len(chunk.tokens) for chunk in chunks) <= LIMITS.budget
        assert all(len(chunk.tokens) <= LIMITS.chunk_size for chunk in chunks)
        assert [chunk.slot for chunk in chunks] == sorted({chunk.slot for chunk in chunks})
        assert decoding <= {chunk.slot for chunk in chunks if chunk.samples}
        assert bool(chunks) == (decoding != set() or any(s.state is not State.FINISHED for s in self.alive))
        self.alive = [s for s in self.alive if s.state is not State.FINISHED]

    @rule(index=st.integers(0, 100))
    def end(self, index: int) -> None:
        if self.alive:
            self.scheduler.release(self.alive.pop(index % len(self.alive)))

    @invariant()
    def slots_are_conserved(self) -> None:
        held = [s for s in self.alive if s.slot is not None]
        assert [s for s in self.scheduler.slots if s is not None] == sorted(held, key=lambda s: s.slot or 0)
        assert self.scheduler.num_waiting == sum(1 for s in self.alive if s.state is State.WAITING)
        assert sorted(map(id, self.scheduler.unfinished())) == sorted(map(id, self.alive))
        assert self.scheduler.kv_used_tokens == sum(s.num_computed for s in held)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_scheduler_refuses_a_prompt_that_no_slot_can_hold() -> None:
    scheduler = Scheduler(LIMITS, DecodeMaximal())
    scheduler.enqueue(sequence(39))
    with pytest.raises(PromptTooLong, match=r"40 tokens, a slot holds 39 .* raise ctx_per_slot"):
        scheduler.enqueue(sequence(40))


def test_scheduler_refuses_more_than_max_queue_and_names_it() -> None:
    scheduler = Scheduler(Limits(1, 40, 8, 4, max_queue=2), DecodeMaximal())
    scheduler.enqueue(sequence())
    scheduler.enqueue(sequence())
    with pytest.raises(QueueFull, match="max_queue is 2"):
        scheduler.enqueue(sequence())


def test_scheduler_admits_the_urgent_first_but_lets_the_others_age() -> None:
    scheduler = Scheduler(Limits(1, 40, 8, 4), DecodeMaximal())
    old_bulk, bulk, urgent = sequence(priority=9, at=0), sequence(priority=9, at=280), sequence(priority=0, at=300)
    for waiting in (bulk, urgent, old_bulk):
        scheduler.enqueue(waiting)
    order = []
    for _ in range(3):
        order += scheduler.admit()
        scheduler.release(order[-1])
    assert order == [old_bulk, urgent, bulk]


def test_scheduler_expires_waiting_and_running_sequences_once() -> None:
    scheduler = Scheduler(Limits(1, 40, 8, 4), DecodeMaximal())
    running, waiting, patient = sequence(timeout_s=1), sequence(timeout_s=2), sequence()
    for new in (running, waiting, patient):
        scheduler.enqueue(new)
    scheduler.admit()
    assert list(scheduler.expired(0.5)) == []
    assert list(scheduler.expired(3.0)) == [running, waiting]
    assert list(scheduler.expired(3.0)) == []


@pytest.mark.parametrize("shares", [[(0, 9)], [(0, 5)], [(0, 0)], [(0, 1), (0, 1)], [(2, 1)], []])
def test_scheduler_refuses_a_batch_that_a_strategy_got_wrong(shares: list[Share]) -> None:
    class Wrong:
        def build_batch(self, slots: object, budget: int, chunk_size: int, queue_depth: int) -> list[Share]:
            return shares

    scheduler = Scheduler(LIMITS, Wrong())
    scheduler.enqueue(sequence(20))
    scheduler.admit()
    with pytest.raises(ValueError, match="the batch strategy"):
        scheduler.schedule()


VIEWS = st.lists(st.tuples(st.integers(1, 200), st.booleans(), st.integers(0, 9)), min_size=1, max_size=20).map(
    lambda slots: [SlotView(i, 1 if d else pending, d, priority) for i, (pending, d, priority) in enumerate(slots)]
)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@given(views=VIEWS, budget=st.integers(20, 300), chunk_size=st.integers(1, 128))
def test_strategy_keeps_to_the_budget_and_leaves_nothing_idle(
    name: str, views: list[SlotView], budget: int, chunk_size: int
) -> None:
    shares = make_strategy(name).build_batch(views, budget, chunk_size, 0)
    allowed = {view.slot: min(view.num_pending, chunk_size) for view in views}
    assert len(dict(shares)) == len(shares)
    assert all(1 <= count <= allowed[slot] for slot, count in shares)
    total = sum(count for _, count in shares)
    assert total <= budget
    # Equal chunks may leave a rest smaller than the number of slots.
    assert total >= min(budget, sum(allowed.values())) - len(views)


@given(views=VIEWS, budget=st.integers(20, 300), chunk_size=st.integers(1, 128))
def test_decode_maximal_takes_every_decode(views: list[SlotView], budget: int, chunk_size: int) -> None:
    shares = dict(DecodeMaximal().build_batch(views, budget, chunk_size, 0))
    assert all(shares.get(view.slot) == 1 for view in views if view.decoding)


def test_strategies_split_a_tight_budget_as_they_say() -> None:
    views = [SlotView(i, 1, True, 9) for i in range(8)] + [SlotView(8 + i, 500, False, 9) for i in range(2)]

    def tokens(name: str) -> tuple[int, int]:
        shares = make_strategy(name).build_batch(views, 10, 512, 0)
        return sum(c for s, c in shares if s < 8), sum(c for s, c in shares if s >= 8)

    assert tokens("decode_maximal") == (8, 2)
    assert tokens("prefill_priority") == (0, 10)
    assert tokens("balanced") == (5, 5)
    assert tokens("adaptive") == tokens("prefill_priority")
    views[0] = SlotView(0, 1, True, 3)
    assert tokens("adaptive") == tokens("decode_maximal")


class Mine:
    """A strategy of a user: one slot at a time."""

    def build_batch(self, slots: list[SlotView], budget: int, chunk_size: int, queue_depth: int) -> list[Share]:
        return [(slots[0].slot, min(slots[0].num_pending, budget, chunk_size))]


def test_strategy_by_import_path_is_used() -> None:
    assert type(make_strategy(f"{__name__}:Mine")).__name__ == "Mine"
    for path, message in {
        "nowhere.module:X": "can't be made: No module",
        f"{__name__}:Nothing": "has no attribute 'Nothing'",
        f"{__name__}:State": "can't be made",
        "builtins:dict": "has no method build_batch",
        "decode_maximum": "did you mean 'decode_maximal'",
    }.items():
        with pytest.raises(InvalidRequest, match=message):
            make_strategy(path)


@pytest.mark.parametrize("name", [*sorted(STRATEGIES), "mine"])
def test_nobody_starves_under_any_strategy(name: str) -> None:
    strategy = Mine() if name == "mine" else make_strategy(name)
    scheduler = Scheduler(LIMITS, strategy)
    waiting = [sequence(1 + i % 30, priority=i % 10) for i in range(12)]
    for new in waiting:
        scheduler.enqueue(new)
    for _ in range(12 * 40):
        run_step(scheduler)
    assert all(s.state is State.FINISHED for s in waiting)


def test_equal_chunks_are_equal_when_the_budget_serves_everybody() -> None:
    views = [SlotView(i, 1000, False) for i in range(4)]
    assert equal_chunks(views, 512, 512) == [(0, 128), (1, 128), (2, 128), (3, 128)]


def test_equal_chunks_serve_the_first_when_the_budget_is_too_small_for_all() -> None:
    views = [SlotView(i, 1000, False) for i in range(8)]
    assert equal_chunks(views, 2 * MIN_CHUNK, 512) == [(0, MIN_CHUNK), (1, MIN_CHUNK)]

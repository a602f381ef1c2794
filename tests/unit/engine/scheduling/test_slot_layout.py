"""Decoding slots become neighbours, and the content of other slots is unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.engine import Request
from cellama.engine.fake import FakeBackend
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.sequence import Sequence, State
from cellama.engine.scheduling.slot_layout import RECHECK_STEPS, runs_of

from .schedulers import new_scheduler, run_step

N_SLOTS = 8


def running(busy: list[int], num_prompt: int = 70, max_tokens: int = 1000, **memory: Any) -> Scheduler:
    """Return a scheduler whose slots have all had a sequence.

    The `busy` ones still decode, and the others keep their cells.
    """
    scheduler = new_scheduler(
        limits=Limits(2000, 2000), **{"n_slots": N_SLOTS, "ctx_per_slot": 500, "n_batch": 4000, **memory}
    )
    scheduler.layout.is_active = False
    for slot in range(N_SLOTS):
        prompt = tuple(range(100 * slot, 100 * slot + num_prompt))
        request = Request(str(slot), prompt, max_tokens=max_tokens)
        scheduler.enqueue(Sequence(request, 0, 0.0, list(prompt)), 0)
        run_step(scheduler)
    for holder in list(scheduler.slots):
        if holder is not None and holder.slot not in busy:
            scheduler.release(holder)
    scheduler.layout.is_active = not scheduler.cache.memory.unified
    return scheduler


def backend_of(scheduler: Scheduler) -> FakeBackend:
    assert isinstance(scheduler.cache.memory, FakeBackend)
    return scheduler.cache.memory


def busy_slots(scheduler: Scheduler) -> list[int]:
    return [slot for slot, holder in enumerate(scheduler.slots) if holder is not None]


def rows(scheduler: Scheduler) -> list[int]:
    """Return the slots of the last decode call."""
    return [chunk.slot for chunk in backend_of(scheduler).batches[-1]]


def contents(scheduler: Scheduler) -> list[list[object]]:
    return [[cell.token for cell in cells] for cells in backend_of(scheduler).cells]


def test_holes_are_padded_when_a_pass_costs_more_than_rows_and_padding_is_removed_afterwards() -> None:
    scheduler = running([0, 2, 5], max_tokens=2)
    idle = {slot: cells for slot, cells in enumerate(contents(scheduler)) if slot not in (0, 2, 5)}
    padded = 0
    for _ in range(100):
        run_step(scheduler, pass_s=1e-3, row_s=1e-9)  # a GPU, with too few remaining steps for a move to pay
        padded += rows(scheduler) == [0, 1, 2, 3, 4, 5]
    assert padded >= 90  # the other steps try out alternatives
    assert {slot: contents(scheduler)[slot] for slot in idle} == idle
    assert busy_slots(scheduler) == [0, 2, 5]
    again = Request("again", (*range(100, 170), 7))
    scheduler.enqueue(Sequence(again, 0, 0.0, list(again.prompt)), 0)
    (admitted,) = scheduler.admit(0)
    assert (admitted.slot, admitted.num_cached) == (1, 70)


def test_holes_are_not_filled_when_rows_cost_more_than_passes() -> None:
    scheduler = running([0, 2, 5], max_tokens=2)
    plain = 0
    for _ in range(100):
        run_step(scheduler, pass_s=1e-9, row_s=1e-3)
        plain += rows(scheduler) == [0, 2, 5]
    assert plain >= 90  # the other steps try out alternatives
    assert scheduler.layout.num_moves == 0


def test_slots_are_not_padded_without_a_free_cell_or_when_memory_cannot_be_truncated() -> None:
    full = running([0, 2], num_prompt=70, ctx_per_slot=90, max_tokens=2)
    full.cache.extend(
        1, 90 - full.cache.cells.of(1)
    )  # changes only the accounts, because nothing may be computed there
    for scheduler in (full, running([0, 2], partial_reuse=False, max_tokens=3)):
        works = scheduler.schedule(0)
        assert scheduler.layout.fill(works) == (works, [])


@pytest.mark.parametrize("partial_reuse", [False, True])
def test_hole_is_filled_with_the_next_token_of_a_prompt(partial_reuse: bool) -> None:
    scheduler = running([0, 2], partial_reuse=partial_reuse)
    scheduler.observe_decode([work.chunk for work in scheduler.schedule(0)], 1.0)
    reader = Request("reader", tuple(range(900, 1000)))
    scheduler.enqueue(Sequence(reader, 0, 0.0, list(reader.prompt)), 0)
    scheduler.cache.clear(1)
    (reading,) = scheduler.admit(0)
    assert reading.slot == 1
    decoding = [work for work in scheduler.schedule(0) if work.sequence is not reading]
    works, padding = scheduler.layout.fill(decoding)
    assert ([work.chunk.slot for work in works], padding) == ([0, 1, 2], [])
    assert (works[1].chunk.tokens, works[1].chunk.samples) == ([900], False)


@pytest.mark.parametrize("partial_reuse", [False, True])
@pytest.mark.parametrize("busy", [[0, 2, 4, 6], [1, 7], [0, 3, 4, 7], [7, 0, 2, 3, 5]])
def test_sequences_move_together_and_cached_cells_move_in_the_opposite_direction(
    busy: list[int], partial_reuse: bool
) -> None:
    scheduler = running(busy, partial_reuse=partial_reuse)
    sequences = [holder for holder in scheduler.slots if holder is not None]
    cached = sorted(map(str, (cells for slot, cells in enumerate(contents(scheduler)) if slot not in busy)))
    for _ in range(4):
        run_step(scheduler, pass_s=1.0, row_s=0.1)
    assert len(runs_of(busy_slots(scheduler))) == 1
    for each in sequences:
        assert scheduler.slots[each.slot or 0] is each
        assert contents(scheduler)[each.slot or 0] == each.tokens[: each.num_computed]
    idle = [cells for slot, cells in enumerate(contents(scheduler)) if scheduler.slots[slot] is None]
    assert sorted(map(str, idle)) == cached
    assert scheduler.layout.num_moves > 0
    slot = next(slot for slot in range(N_SLOTS) if scheduler.slots[slot] is None)
    tokens = [*contents(scheduler)[slot], 7]
    again = Request("again", tuple(t for t in tokens if isinstance(t, int)))
    scheduler.enqueue(Sequence(again, 0, 0.0, list(again.prompt)), 0)
    (admitted,) = scheduler.admit(0)
    assert admitted.num_cached == len(tokens) - 1


def test_sequences_are_not_moved_when_they_finish_before_the_move_pays_off() -> None:
    for max_tokens, moved in ((4, False), (1000, True)):
        scheduler = running([0, 2, 4, 6], max_tokens=max_tokens, partial_reuse=False)
        run_step(scheduler, pass_s=1e-3, row_s=1e-6)
        scheduler.layout._move_costs.observe(70, 0.01)
        run_step(scheduler, pass_s=1e-3, row_s=1e-6)
        assert (scheduler.layout.num_moves > 0) == moved


def test_moves_within_a_step_take_no_longer_than_the_decode_call_of_the_step() -> None:
    scheduler = running([0, 2, 4, 6])
    times = iter(range(1000))  # each read of the clock is a second later
    for _ in range(8):
        run_step(scheduler, pass_s=0.1, row_s=0.1)
        before = scheduler.layout.num_moves
        scheduler.layout.execute(scheduler.layout.plan_moves(), lambda: float(next(times)))
        assert scheduler.layout.num_moves <= before + 1


@pytest.mark.parametrize("place", ["save", "restore", "copy", "trim"])
def test_failing_move_costs_time_but_changes_no_text(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = running([0, 2])
    run_step(scheduler, pass_s=1.0, row_s=0.1)
    scheduler.layout.is_active = True
    backend, failed = backend_of(scheduler), []
    real = getattr(backend, place)

    def fail_once(*args: Any) -> Any:
        if not failed:
            failed.append(args)
            raise MemoryError
        return real(*args)

    monkeypatch.setattr(backend, place, fail_once)
    moves = scheduler.layout.plan_moves()
    scheduler.layout.execute(moves, lambda: 0.0)
    assert failed
    for holder in scheduler.slots:
        assert holder is None or contents(scheduler)[holder.slot or 0] == holder.tokens[: holder.num_computed]
    for _ in range(300):
        run_step(scheduler, pass_s=1.0, row_s=0.1)
        assert [scheduler.cache.cells.of(slot) for slot in range(N_SLOTS)] == [len(c) for c in backend.cells]
    assert all(holder is None or holder.state is State.DECODING for holder in scheduler.slots)


def test_impossible_move_is_not_retried_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, tried = running([0, 2]), list[int]()

    def fail(slot: int) -> Any:
        tried.append(slot)
        raise MemoryError

    monkeypatch.setattr(backend_of(scheduler), "save", fail)
    for _ in range(RECHECK_STEPS):
        run_step(scheduler, pass_s=1.0, row_s=0.1)
    assert len(tried) == 1


def test_unified_layout_neither_fills_holes_nor_moves_sequences() -> None:
    scheduler = running([0, 2, 5], unified=True, n_cells=4000)
    for _ in range(3):
        run_step(scheduler, pass_s=1.0, row_s=0.1)
    assert rows(scheduler) == [0, 2, 5]

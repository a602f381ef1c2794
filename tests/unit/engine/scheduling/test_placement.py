"""Interactive sequences get neighboring slots among bulk ones, and don't wait long for older bulk requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cellama.engine import Request
from cellama.engine.backend import Adapter, AdapterUse
from cellama.engine.fake import FakeBackend
from cellama.engine.scheduling.admission import AGEING_S
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.scheduling.slot_layout import runs_of
from cellama.engine.scheduling.strategies import HOLD_S

from .schedulers import new_scheduler, run_step

BULK, READER = 9, 3
MEMORY = {"n_slots": 8, "ctx_per_slot": 500, "n_batch": 4000}
AGED_S = AGEING_S * (BULK - READER) + 1


def new(scheduler: Scheduler, priority: int, now: float = 0.0, length: int = 70, **params: Any) -> Sequence:
    """Return one more waiting sequence with a prompt of its own."""
    draw = random.Random(scheduler.queue.num_waiting + 100 * scheduler.num_busy + int(now))
    request = Request("r", tuple(draw.choices(range(256), k=length)), priority=priority, max_tokens=400)
    made = Sequence(request, 0, now, list(request.prompt), **params)
    scheduler.enqueue(made, now)
    return made


def full_of_bulk(**memory: Any) -> Scheduler:
    """Return a scheduler whose slots all decode for bulk requests, which arrived at 0. States can be saved."""
    scheduler = new_scheduler(limits=Limits(2000, 2000), **{"ram_bytes": 100_000, **MEMORY, **memory})
    for _ in range(MEMORY["n_slots"]):
        new(scheduler, BULK)
    for _ in range(3):
        run_step(scheduler)
    assert scheduler.num_busy == MEMORY["n_slots"]
    return scheduler


def slots_of_readers(scheduler: Scheduler) -> list[int]:
    return [slot for slot, s in enumerate(scheduler.slots) if s is not None and s.request.is_interactive]


def assert_texts_hold(scheduler: Scheduler) -> None:
    backend = scheduler.cache.memory
    assert isinstance(backend, FakeBackend)
    for slot, s in enumerate(scheduler.slots):
        if s is not None:
            assert (s.slot, scheduler.cache.cells.of(slot)) == (slot, s.num_computed)
            assert [cell.token for cell in backend.cells[slot]] == s.tokens[: s.num_computed]


def test_interactive_requests_take_neighboring_slots_from_bulk_requests() -> None:
    scheduler = full_of_bulk()
    for now in range(1, 5):
        new(scheduler, READER, now)
        run_step(scheduler, now)
        assert len(runs_of(slots_of_readers(scheduler))) == 1
    assert scheduler.layout.num_moves == 0
    assert_texts_hold(scheduler)


@pytest.mark.parametrize("memory", [{"ram_bytes": 0}, {"unified": True, "n_cells": 4000}])
def test_youngest_bulk_request_yields_when_work_would_be_lost_or_slots_are_equivalent(memory: dict[str, Any]) -> None:
    scheduler = full_of_bulk(**memory)
    victims = scheduler.finder.victims(new(scheduler, READER, 1), 1)
    assert [victim.order for victim in victims] == list(range(MEMORY["n_slots"]))[::-1]


def test_interactive_request_gets_a_slot_next_to_requests_with_its_adapters() -> None:
    scheduler = full_of_bulk()
    adapters = (AdapterUse(Adapter("a", "key", "handle"), 1.0),)
    new(scheduler, READER, 1)
    scheduler.admit(1)
    assert slots_of_readers(scheduler) == [0]
    ended = scheduler.slots[6]
    assert ended is not None
    scheduler.release(ended, keep=False)
    other = new(scheduler, READER, 2, adapters=adapters)
    scheduler.admit(2)
    assert other.slot == 6
    for like, slots in (((), {1}), (adapters, {5, 7})):
        next_reader = new(scheduler, READER, 3, adapters=like)
        assert scheduler.finder.victims(next_reader, 3)[0].slot in slots


def test_interactive_request_starts_in_the_slot_with_its_prefix_and_moves_next_to_the_others() -> None:
    scheduler = full_of_bulk()
    ended = scheduler.slots[7]
    assert ended is not None
    for now in (1, 2):
        new(scheduler, READER, now)
        run_step(scheduler, now)
    scheduler.release(ended)
    request = Request("again", (*ended.tokens[: ended.num_computed], 1, 2), priority=READER, max_tokens=400)
    again = Sequence(request, 0, 3, list(request.prompt))
    scheduler.enqueue(again, 3)
    assert scheduler.admit(3) == [again]
    assert (again.slot, again.num_cached) == (7, ended.num_computed)
    for now in range(4, 12):
        run_step(scheduler, now, pass_s=1.0, row_s=0.1)
    assert len(runs_of(slots_of_readers(scheduler))) == 1
    assert scheduler.layout.num_moves > 0
    assert_texts_hold(scheduler)


@pytest.mark.parametrize("partial_reuse", [False, True])
def test_interactive_requests_swap_slots_with_running_bulk_requests(partial_reuse: bool) -> None:
    scheduler = full_of_bulk(partial_reuse=partial_reuse)
    sequences = [s for s in scheduler.slots if s is not None]
    for slot in (0, 3, 6):  # treat these as interactive
        holder = scheduler.slots[slot]
        assert holder is not None
        holder.request = Request("s", holder.request.prompt, priority=READER, max_tokens=400)
    scheduler._rotation._groups[()].num_interactive = 3
    for now in range(20):
        run_step(scheduler, now, pass_s=1.0, row_s=0.1)
        assert_texts_hold(scheduler)
    assert len(runs_of(slots_of_readers(scheduler))) == 1
    assert {s for s in scheduler.slots if s is not None} == set(sequences)
    assert scheduler.num_preemptions == 0


def test_older_bulk_requests_do_not_delay_an_interactive_request_but_still_finish() -> None:
    scheduler = full_of_bulk(n_slots=8)
    waiting = [new(scheduler, BULK) for _ in range(100)]
    reader = new(scheduler, READER, AGED_S)
    assert scheduler.admit(AGED_S) == [reader]
    for each in waiting:
        scheduler.release(each)
    scheduler.release(reader)
    (again,) = scheduler.admit(AGED_S)  # the one that lost its slot
    for s in scheduler.slots:
        assert s is not None
        s.placed_at = s.num_output_placed = 0
        s.rank = -1000.0
    again.placed_at, again.num_output_placed = AGED_S, again.num_output
    next_reader = new(scheduler, READER, AGED_S)
    assert again not in scheduler.finder.victims(next_reader, AGED_S + HOLD_S)
    again.tokens.append(7)
    assert again not in scheduler.finder.victims(next_reader, AGED_S + HOLD_S / 2)
    assert again in scheduler.finder.victims(next_reader, AGED_S + HOLD_S)


def test_bulk_request_in_the_only_slot_finishes_even_if_interactive_requests_keep_arriving() -> None:
    scheduler = new_scheduler(n_slots=1, ctx_per_slot=200, n_batch=300, limits=Limits(200, 200), ram_bytes=0)
    bulk = new(scheduler, BULK, length=100)
    for step in range(2000):
        now = AGED_S + 0.3 * step
        while scheduler.queue.num_waiting < 2:
            new(scheduler, READER, now, length=150)
        run_step(scheduler, now)
        if bulk.num_output >= 50:
            return
    raise AssertionError(f"{bulk.num_output} tokens")

"""Slots that are guaranteed to bulk requests while interactive ones wait."""

from __future__ import annotations

import pytest

from cellama.engine import EngineOptions, InvalidRequest
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.sequence import Sequence

from .schedulers import new_scheduler, sequence

INTERACTIVE, BULK = 0, 9


def scheduler_with(bulk_slots: int, n_slots: int = 4) -> Scheduler:
    return new_scheduler(n_slots=n_slots, limits=Limits(budget=16, chunk_size=16, bulk_slots=bulk_slots))


def enqueue(scheduler: Scheduler, count: int, priority: int, now: float = 0.0) -> list[Sequence]:
    """Queue sequences with different prompts, and admit as many as possible."""
    sequences = [sequence(5 + number, priority, cache_prompt=False) for number in range(count)]
    for each in sequences:
        scheduler.enqueue(each, now)
    scheduler.admit(now)
    return sequences


def num_running(sequences: list[Sequence]) -> int:
    return sum(each.slot is not None for each in sequences)


@pytest.mark.parametrize(("guaranteed", "kept"), [(0, 0), (1, 1), (3, 3)])
def test_interactive_requests_leave_guaranteed_slots_to_bulk_requests(guaranteed: int, kept: int) -> None:
    scheduler = scheduler_with(guaranteed)
    bulk = enqueue(scheduler, 6, BULK)
    assert num_running(bulk) == 4
    interactive = enqueue(scheduler, 6, INTERACTIVE, now=1.0)
    assert (num_running(bulk), num_running(interactive)) == (kept, 4 - kept)


@pytest.mark.parametrize("guaranteed", [0, 1])
def test_idle_slot_goes_to_a_bulk_request_until_the_guarantee_is_met(guaranteed: int) -> None:
    scheduler = scheduler_with(guaranteed)
    interactive = enqueue(scheduler, 6, INTERACTIVE)
    bulk = enqueue(scheduler, 2, BULK)
    assert (num_running(interactive), num_running(bulk)) == (4, 0)  # interactive requests are not preempted
    for finished in interactive[:2]:
        scheduler.release(finished)
        scheduler.admit(0.0)
    assert num_running(bulk) == guaranteed


def test_interactive_requests_use_guaranteed_slots_that_bulk_requests_leave_idle() -> None:
    interactive = enqueue(scheduler_with(2), 6, INTERACTIVE)
    assert num_running(interactive) == 4


def test_urgent_request_preempts_interactive_requests_but_not_guaranteed_bulk_requests() -> None:
    scheduler = scheduler_with(1, n_slots=2)
    bulk = enqueue(scheduler, 1, BULK)
    slow = enqueue(scheduler, 1, 5)
    urgent = enqueue(scheduler, 1, INTERACTIVE, now=1.0)
    assert (num_running(bulk), num_running(slow), num_running(urgent)) == (1, 0, 1)


@pytest.mark.parametrize(
    ("share", "slots", "expected"), [(0, 8, 0), (0.25, 8, 2), (0.01, 8, 1), (0.9, 2, 1), (0.5, 1, 0)]
)
def test_bulk_share_is_at_least_one_slot_but_never_all_slots(share: float, slots: int, expected: int) -> None:
    assert EngineOptions(n_parallel=slots, bulk_share=share).bulk_slots == expected


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_invalid_share_is_rejected(share: float) -> None:
    with pytest.raises(InvalidRequest, match=r"bulk_share is .* at least 0 and less than 1"):
        EngineOptions(bulk_share=share)

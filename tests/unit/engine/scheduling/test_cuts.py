"""Prefill stops for checkpoints that other sequences need, on the fake recurrent memory."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.engine import Request
from cellama.engine.scheduling.admission import MAX_CUTS
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.text.reply_reader import ReplyFormat

from .schedulers import new_scheduler, run_step


def scheduler_of(**memory: Any) -> Scheduler:
    options = {"n_slots": 3, "ctx_per_slot": 4000, "n_batch": 4000, "partial_reuse": False, "ram_bytes": 10_000}
    return new_scheduler(limits=Limits(50, 50), **{**options, **memory})


def wait(scheduler: Scheduler, tokens: list[int], **params: Any) -> Sequence:
    new = Sequence(Request("r", tuple(tokens), **params), 0, 0.0, list(tokens))
    scheduler.enqueue(new, 0)
    return new


def test_prefill_stops_where_waiting_prompts_diverge() -> None:
    scheduler = scheduler_of(n_slots=1)
    first = wait(scheduler, list(range(400)))
    for shared in (300, 180, 120, 30, 305):
        wait(scheduler, [*range(shared), -shared])
    chunks = [chunk for _ in range(10) for chunk in run_step(scheduler)]
    assert first.cuts == (120, 300)  # the cuts 180 and 305 would be so close that computing the tokens again is faster
    assert [len(chunk.tokens) for chunk in chunks] == [50, 50, 20, 50, 50, 50, 30, 50, 50, 1]


@pytest.mark.parametrize("params", [{}, {"reply": ReplyFormat()}])
def test_chat_is_cut_before_the_end_of_its_prompt(params: dict[str, Any]) -> None:
    scheduler = scheduler_of()
    first = wait(scheduler, list(range(200)), **params)
    scheduler.admit(0)
    assert first.cuts == ((196,) if params else ())


def test_number_of_cuts_is_limited_when_there_are_many_branches() -> None:
    scheduler = scheduler_of(n_slots=1)
    first = wait(scheduler, list(range(3000)))
    for shared in range(100, 2900, 10):
        wait(scheduler, [*range(shared), -1])
    scheduler.admit(0)
    assert 1 < len(first.cuts) <= MAX_CUTS


def test_sequence_waits_for_a_cut_when_it_arrives_while_its_prefix_is_computed() -> None:
    scheduler = scheduler_of()
    wait(scheduler, list(range(300)))
    run_step(scheduler)
    second = wait(scheduler, [*range(170), -1])
    for _ in range(3):
        run_step(scheduler)
        assert second.slot is None
    run_step(scheduler)
    assert (second.slot is not None, second.num_cached) == (True, 170)


def test_sequence_that_arrives_too_late_for_a_cut_does_not_wait() -> None:
    scheduler = scheduler_of()
    wait(scheduler, list(range(300)))
    for _ in range(5):
        run_step(scheduler)
    second = wait(scheduler, [*range(170), -1])
    third = wait(scheduler, [*range(170), -2])  # the second prompt is cut for this one
    scheduler.admit(0)
    assert (second.slot is not None, second.num_cached, third.slot) == (True, 0, None)
    assert second.cuts == (170,)


def test_prompts_are_not_cut_when_memory_can_be_truncated() -> None:
    scheduler = scheduler_of(partial_reuse=True)
    first, _ = wait(scheduler, list(range(300))), wait(scheduler, [*range(170), -1])
    scheduler.admit(0)
    assert first.cuts == ()

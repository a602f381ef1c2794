"""Situations without drafts, and costs that are not learned from steps with drafts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cellama.engine import EngineOptions, Handle, Pulse, Request, SamplingParams
from cellama.engine.core import forward
from cellama.engine.core.engine_core import Command, EngineCore
from cellama.engine.fake import FakeBackend, FakePlan
from cellama.engine.scheduling.strategies import Adaptive, SlotView

from ....eager_gate import Eager
from .test_draft_model_gain import Clock
from .test_texts import run

PREDICTED = Request("it", tuple(b"a prompt"), SamplingParams(temperature=0), max_tokens=60, ignore_eos=True)


def drafting_core(num_slots: int = 4, **backend: bool) -> tuple[EngineCore, FakeBackend]:
    fake = FakeBackend(n_slots=num_slots, ctx_per_slot=96, **backend)
    core = EngineCore(fake, EngineOptions(n_parallel=num_slots, n_batch=64, speculation="auto"), Pulse("test"))
    core.drafting.gate = Eager(1)  # type: ignore[assignment]
    return core, fake


def submit(core: EngineCore, request: Request) -> Handle:
    handle = Handle(replace(request, submitted_at=0.0), lambda *_: None, None, plan=FakePlan(request.sampling))
    assert core.inbox.submit(Command("submit", handle))
    return handle


def predicted(name: str, priority: int) -> Request:
    request = replace(PREDICTED, id=name, prompt=tuple(name.encode()), priority=priority)
    return replace(request, prediction=run([request], eager=None)[0].tokens)


@pytest.mark.parametrize("priorities", [(3, 3), (9, 9), (3, 9)])
def test_mixed_bulk_and_interactive_requests_get_no_drafts(priorities: tuple[int, int]) -> None:
    core, fake = drafting_core()
    for name, priority in zip(("one", "two"), priorities, strict=True):
        submit(core, predicted(name, priority))
    for _ in range(20):
        core.step()
    has_drafts = any(chunk.num_drafts for chunks in fake.batches for chunk in chunks)
    assert has_drafts == (priorities[0] == priorities[1])


def test_padded_slot_generates_the_same_text_as_an_unpadded_slot() -> None:
    core, fake = drafting_core()
    requests = [
        predicted("one", 9),
        replace(PREDICTED, id="other", prompt=tuple(b"other"), priority=9),
        predicted("three", 9),
    ]
    handles = [submit(core, request) for request in requests]
    while not all(handle.done for handle in handles):
        core.step()
    assert any(len(chunk.tokens) > 1 and not chunk.num_drafts for chunks in fake.batches for chunk in chunks)
    for handle, request in zip(handles, requests, strict=True):
        assert handle.result().tokens == run([replace(request, prediction=())], eager=None)[0].tokens


def test_drafts_resume_when_the_stream_has_finished() -> None:
    core, fake = drafting_core()
    submit(core, replace(predicted("short", 3), max_tokens=5))
    submit(core, predicted("bulk", 9))
    while core.telemetry.snapshot.requests_finished < 2:
        core.step()
    counts = [len({chunk.slot for chunk in chunks}) for chunks in fake.batches if any(c.num_drafts for c in chunks)]
    assert set(counts) == {1}


def test_waiting_prompt_is_admitted_before_drafts() -> None:
    core, fake = drafting_core()
    submit(core, predicted("reader", 3))
    core.step()
    core.scheduler.strategy.strategy.build_batch = lambda views, *_: [  # type: ignore[method-assign]
        (view.slot, 1) for view in views if view.decoding
    ]
    submit(core, replace(PREDICTED, id="late"))
    for _ in range(10):
        core.step()
    assert not any(chunk.num_drafts for chunks in fake.batches for chunk in chunks)


@pytest.mark.parametrize("unified", [False, True])
def test_gate_observes_only_steps_with_drafts(unified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    core, fake = drafting_core(unified=unified)
    clock, told = Clock(), list[float]()
    monkeypatch.setattr(forward, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(core.drafting.gate, "account", lambda tokens, seconds: told.append(seconds))
    decode = fake.decode

    def in_a_second(*call: Any) -> None:
        clock.now += 1.0
        decode(*call)

    monkeypatch.setattr(fake, "decode", in_a_second)
    submit(core, predicted("bulk", 9))
    while not fake.batches or not fake.batches[-1][0].num_drafts:
        core.step()
    stream = submit(core, replace(PREDICTED, id="stream", max_tokens=20))  # there are no drafts while it runs
    while core.has_work:
        core.step()
    assert stream.done
    assert told
    assert max(told) == 1.0


def test_strategy_observes_no_tokens_in_steps_with_drafts() -> None:
    core, fake = drafting_core()
    told: list[int] = []
    core.scheduler.strategy.strategy.observe = lambda tokens, seconds: told.append(tokens)  # type: ignore[method-assign]
    submit(core, predicted("one", 3))
    while core.telemetry.snapshot.requests_finished < 1:
        core.step()
    assert len(told) == len(fake.batches)
    for chunks, tokens in zip(fake.batches, told, strict=True):
        assert (tokens == 0) == any(chunk.num_drafts for chunk in chunks)


def test_adaptive_strategy_learns_no_costs_from_steps_with_drafts() -> None:
    strategy, view = Adaptive(), SlotView(0, 1, True)
    for tokens, seconds in [(1, 0.01), (0, 5.0), (0, 5.0)]:
        strategy.build_batch([view], 512, 512, 0)
        strategy.observe(tokens, seconds)
    assert strategy._rows.alone_s == 0.01
    assert not strategy.may_yield(10_000)  # the prefill rate is unknown

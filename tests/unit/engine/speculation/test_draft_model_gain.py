"""A draft model is used where it pays off, including its own time, on simulated machines with a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from cellama.engine import EngineOptions, Handle, Pulse, Request, SamplingParams
from cellama.engine.backend import AdapterSet, Chunk
from cellama.engine.core import forward
from cellama.engine.core.engine_core import Command, EngineCore
from cellama.engine.fake import FakeBackend, FakePlan
from cellama.engine.speculation import draft_model

from .test_gate import cpu

Costs = Callable[[int], float]


class Clock:
    """A clock that advances with the computed work."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Timed(FakeBackend):
    """A fake backend whose calls take simulated time."""

    clock: Clock = None  # type: ignore[assignment]
    costs: Costs = cpu

    def decode(self, chunks: Sequence[Chunk], adapters: AdapterSet = ()) -> None:
        self.clock.now += self.costs(sum(len(chunk.tokens) for chunk in chunks))
        super().decode(chunks, adapters)


def seconds(
    monkeypatch: pytest.MonkeyPatch,
    streams: int,
    costs: Costs | None,
    *,
    memory: int = 0,
    prompt: int = 20,
    new: int = 700,
    requests: int = 2,
) -> float:
    """Return the duration of consecutive requests, `streams` at a time, with a draft model that has these costs."""
    clock = Clock()
    for module in (forward, draft_model):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    shape = {"n_slots": streams, "ctx_per_slot": 1024, "n_batch": 512}
    large = Timed(**shape, clock=clock)  # type: ignore[arg-type]
    draft = None if costs is None else Timed(**shape, clock=clock, costs=costs, memory=memory, unified=True)  # type: ignore[arg-type]
    options = EngineOptions(n_parallel=streams, n_batch=512, speculation="off" if draft is None else "auto")
    core = EngineCore(large, options, Pulse("test"), draft=draft)
    for number in range(requests * streams):
        tokens = tuple((number * 7 + at * at) % 256 for at in range(prompt))
        request = Request(f"{number}", tokens, SamplingParams(temperature=0), max_tokens=new, submitted_at=0.0)
        handle = Handle(replace(request, ignore_eos=True), lambda *_: None, None, plan=FakePlan(request.sampling))
        assert core.inbox.submit(Command("submit", handle))
    clock.now = 100.0
    core.step()
    while core.has_work:
        core.step()
    return clock.now - 100.0


def twentieth(rows: int) -> float:
    return cpu(rows) / 20


@pytest.mark.parametrize(("streams", "least"), [(1, 2.0), (4, 1.5)])
def test_cheap_accurate_draft_model_makes_streams_faster(
    monkeypatch: pytest.MonkeyPatch, streams: int, least: float
) -> None:
    assert seconds(monkeypatch, streams, None) >= least * seconds(monkeypatch, streams, twentieth)


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize(("costs", "memory"), [(twentieth, 12), (cpu, 12), (cpu, 0)])
def test_draft_model_that_does_not_pay_off_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, streams: int, costs: Costs, memory: int
) -> None:
    assert seconds(monkeypatch, streams, costs, memory=memory) <= 1.02 * seconds(monkeypatch, streams, None)


def test_draft_model_prefills_a_prompt_only_if_its_answer_is_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short, long = {"prompt": 500, "new": 8, "requests": 40}, {"prompt": 500, "new": 400}
    assert seconds(monkeypatch, 1, twentieth, **short) <= 1.02 * seconds(monkeypatch, 1, None, **short)
    assert seconds(monkeypatch, 1, None, **long) >= 1.5 * seconds(monkeypatch, 1, twentieth, **long)

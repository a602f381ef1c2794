"""Step counts of an engine, for histograms of steps and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from cellama.engine import Completion, EngineOptions, Handle, Pulse, StepCounts
from cellama.engine.core.engine_core import Command, EngineCore
from cellama.engine.fake import FakeBackend, FakePlan
from cellama.engine.scheduling.strategies import SlotView, Strategy, TokenAllocation

from ....eager_gate import Eager
from ...conftest import PATIENCE_S, Gate, MakeEngine, request


class InTurns(Strategy):
    """A strategy that serves one slot per step."""

    def __init__(self) -> None:
        self._steps = count()

    def build_batch(
        self, slots: Sequence[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        view = slots[next(self._steps) % len(slots)]
        return [(view.slot, min(view.num_pending, chunk_size, budget))]


def decode_s(completion: Completion) -> float:
    """Return the time from the first token to the last."""
    rate = completion.timings.generation_rate
    return (completion.usage.completion_tokens - 1) / rate if rate else 0.0


def test_value_is_counted_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    counts = StepCounts((0.01, 0.1), (1.0, 8.0))
    for gap_s in (0.01, 0.011, 0.2):
        counts.gap(gap_s)
    for num_tokens in (1, 2, 8, 9):
        counts.step(num_tokens)
    assert (counts.gaps, counts.gaps_s) == ([1, 1, 1], pytest.approx(0.221))
    assert (counts.batches, counts.tokens) == ([1, 2, 1], 20)


@pytest.mark.parametrize("strategy", ["decode_maximal", f"{__name__}:InTurns"])
def test_gap_is_measured_from_the_last_token_of_the_same_sequence(make_engine: MakeEngine, strategy: str) -> None:
    engine, backend = make_engine(batch_strategy=strategy)
    gate, counts = Gate(backend), StepCounts((1e9,), (1e9,))
    engine.count_steps(counts)
    handles = [engine.submit(request(letter * 9, letter, max_tokens=7)) for letter in "abc"]
    gate.open.set()
    completions = [handle.result(PATIENCE_S) for handle in handles]
    assert engine.close()
    assert counts.gaps == [sum(done.usage.completion_tokens - 1 for done in completions), 0]
    assert counts.gaps_s == pytest.approx(sum(map(decode_s, completions)))
    assert sum(counts.batches) == engine.snapshot().steps


def test_tokens_of_one_step_count_as_one_gap() -> None:
    core = EngineCore(FakeBackend(), EngineOptions(n_parallel=4, n_batch=64, speculation="auto"), Pulse("test"))
    core.drafting.gate = Eager(1)  # type: ignore[assignment]
    counts = StepCounts((1e9,), (1e9,))
    core.telemetry.step_counts.append(counts)

    def run(prediction: tuple[int, ...]) -> Completion:
        asked = request("a" * 20, max_tokens=30, prediction=prediction, submitted_at=0.0)
        handle = Handle(asked, lambda *_: None, None, plan=FakePlan(asked.sampling))
        assert core.inbox.submit(Command("submit", handle))
        while not handle.done:
            core.step()
        return handle.result(0)

    first = run(())
    before = sum(counts.gaps)
    usage = run(first.tokens).usage
    assert usage.accepted_prediction_tokens > 0
    assert sum(counts.gaps) - before == usage.completion_tokens - 1 - usage.accepted_prediction_tokens
    assert all(0 < count.drafts <= count.drafted for count in core.drafting.counts.values())

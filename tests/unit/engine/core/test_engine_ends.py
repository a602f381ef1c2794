"""Aborted decode calls, and callers that disconnect."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from cellama.engine import StepStats
from cellama.engine.backend import AdapterSet, Chunk
from cellama.engine.fake import FakeBackend
from cellama.engine.scheduling import strategies
from cellama.engine.scheduling.strategies import DEFERRED_SHARE, DecodeMaximal, Interruptions

from ....conftest import wait_until
from ...conftest import PATIENCE_S, Gate, MakeEngine, cold, request


def test_cancelling_the_request_that_fills_the_batch_aborts_the_decode_call(make_engine: MakeEngine) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=2))
    gate = Gate(backend)
    handle = engine.submit(request("x" * 200))
    assert gate.reached.wait(PATIENCE_S)
    handle.cancel()
    gate.open.set()
    assert handle.result(PATIENCE_S).finish_reason == "cancelled"
    assert backend.num_used() == 0


@pytest.mark.parametrize("priority", [9, 3])
def test_interactive_request_aborts_a_decode_call_for_bulk_requests(make_engine: MakeEngine, priority: int) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=2))
    gate = Gate(backend)
    bulk = engine.submit(request("x" * 40, max_tokens=4, priority=9))
    assert gate.reached.wait(PATIENCE_S)
    other = engine.submit(request("other", max_tokens=4, priority=priority))
    gate.open.set()
    texts = [handle.result(PATIENCE_S).text for handle in (bulk, other)]
    assert texts == [cold(make_engine, prompt, max_tokens=4).text for prompt in ("x" * 40, "other")]
    num_reads = sum(chunk.position == 0 and len(chunk.tokens) == 40 for batch in backend.batches for chunk in batch)
    assert num_reads == (2 if priority == 3 else 1)


@pytest.mark.parametrize("deferred_share", [DEFERRED_SHARE, -1e9])
def test_no_bulk_decode_call_starts_after_an_interactive_request_has_arrived(
    make_engine: MakeEngine, deferred_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "DEFERRED_SHARE", deferred_share)  # below 0, no time is available
    engine, backend = make_engine(FakeBackend(n_slots=3), batch_strategy="decode_maximal")
    decode, handles, begun = backend.decode, [], threading.Event()
    coming = {1: request("b" * 40, max_tokens=4, priority=9), 40: request("c" * 5, max_tokens=4, priority=3)}

    def decode_while_others_come(chunks: Sequence[Chunk], adapters: AdapterSet) -> None:
        assert begun.wait(PATIENCE_S)
        if (asked := coming.pop(len(chunks[0].tokens), None)) is not None:
            handles.append(engine.submit(asked))
        decode(chunks, adapters)

    backend.decode = decode_while_others_come  # type: ignore[method-assign]
    handles.append(engine.submit(request("a" * 9, max_tokens=60, priority=9)))
    begun.set()
    wait_until(lambda: len(handles) == 3, "all three")
    assert [handle.result(PATIENCE_S).usage.completion_tokens for handle in handles] == [60, 4, 4]
    sizes = [[len(chunk.tokens) for chunk in batch] for batch in backend.batches]
    assert sizes[sizes.index([40]) + 1] == ([5] if deferred_share > 0 else [1])


def test_decode_calls_without_protected_requests_wait_after_a_protected_request_has_arrived(
    make_engine: MakeEngine,
) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=4, n_batch=512), batch_strategy="prefill_priority")
    decode, handles, begun = backend.decode, [], threading.Event()

    def decode_while_another_comes(chunks: Sequence[Chunk], adapters: AdapterSet) -> None:
        assert begun.wait(PATIENCE_S)
        if len(chunks[0].tokens) == 130 and len(handles) == 2:
            handles.append(engine.submit(request("c" * 5, max_tokens=4, priority=0)))
        decode(chunks, adapters)

    backend.decode = decode_while_another_comes  # type: ignore[method-assign]
    handles += [engine.submit(request("a" * 130, max_tokens=4)), engine.submit(request("b" * 140, max_tokens=4))]
    begun.set()
    wait_until(lambda: len(handles) == 3, "the protected request")
    assert [handle.result(PATIENCE_S).usage.completion_tokens for handle in handles] == [4, 4, 4]
    sizes = [[len(chunk.tokens) for chunk in batch] for batch in backend.batches]
    assert sizes.index([5]) == sizes.index([130]) + 1, "the protected prompt is next"


class Long(DecodeMaximal):
    """A strategy that lets an interactive request abort every decode call of this size."""

    def may_yield(self, num_tokens: int) -> bool:
        return num_tokens == 41


@pytest.mark.parametrize("num_tokens", [40, 41])
def test_short_decode_calls_are_aborted_only_within_the_interruption_budget(
    make_engine: MakeEngine, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Interruptions, "are_affordable", False)
    engine, backend = make_engine(FakeBackend(n_slots=2), batch_strategy=f"{__name__}:Long")
    gate = Gate(backend)
    bulk = engine.submit(request("x" * num_tokens, max_tokens=4, priority=9))
    assert gate.reached.wait(PATIENCE_S)
    other = engine.submit(request("other", max_tokens=4, priority=3))
    gate.open.set()
    assert [handle.result(PATIENCE_S).finish_reason for handle in (bulk, other)] == ["length"] * 2
    reads = sum(chunk.position == 0 and len(chunk.tokens) == num_tokens for batch in backend.batches for chunk in batch)
    assert reads == (2 if num_tokens == 41 else 1)


def test_step_stats_contain_the_time_spent_in_python(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    stats: list[StepStats] = []
    engine.add_step_listener(stats.append)
    engine.submit(request()).result(PATIENCE_S)
    assert engine.close()
    assert all(0 <= step.eval_ms <= step.step_ms and step.wait_ms >= 0 for step in stats)
    assert all(step.python_ms == step.step_ms - step.eval_ms for step in stats)

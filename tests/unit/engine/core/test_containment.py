"""A failure that one request causes ends only this request. A failure of all requests ends the engine."""

from __future__ import annotations

import contextlib
import logging
import random
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings, strategies as st

from cellama.engine import (
    DecodeFailed,
    Engine,
    EngineError,
    EngineOptions,
    EngineStopped,
    Finished,
    Handle,
    Request,
    RequestFailed,
    Watchdog,
)
from cellama.engine.backend import DecodeError
from cellama.engine.fake import FakeBackend, FakeCheckpoint
from cellama.engine.scheduling.strategies import SlotView, Strategy, TokenAllocation

from ....conftest import EXAMPLES, wait_until
from ...conftest import PATIENCE_S, Gate, MakeEngine, request
from .faulty import FaultyBackend, at


def texts_alone(prompts: list[str]) -> list[str]:
    engine = Engine(FakeBackend(n_slots=1), EngineOptions(n_parallel=1, n_batch=64))
    texts = [engine.submit(request(prompt)).result(PATIENCE_S).text for prompt in prompts]
    engine.close()
    return texts


def is_in_order(engine: Engine, backend: FakeBackend) -> bool:
    """Return whether every slot is free, and the cache has the right tokens for each."""
    scheduler = engine._core.scheduler
    cells = [scheduler.cache.cells.of(slot) for slot in range(backend.n_slots)]
    return not scheduler.has_work and cells == [len(held) for held in backend.cells]


@pytest.mark.parametrize("place", ["new_sampler", "sample", "decode"])
def test_unexpected_error_ends_only_the_affected_request(make_engine: MakeEngine, place: str) -> None:
    engine, backend = make_engine(FaultyBackend(fault=at(place)))
    prompts = [f"good {i}" for i in range(6)]
    handles = [engine.submit(request(prompt)) for prompt in prompts]
    bad = engine.submit(request("bad!"))
    with pytest.raises(EngineError, match=r"nobody foresaw this.*other requests"):
        bad.result(PATIENCE_S)
    assert [handle.result(PATIENCE_S).text for handle in handles] == texts_alone(prompts)
    assert engine.submit(request("and then")).result(PATIENCE_S).text == texts_alone(["and then"])[0]
    wait_until(lambda: is_in_order(engine, backend), "all slots free")


def test_request_fails_when_converting_its_output_fails_after_cancellation(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FaultyBackend(n_slots=1, ctx_per_slot=10**6))
    running = engine.submit(request(max_tokens=10**6))
    waiting = engine.submit(request("x"))
    engine._core.output.finish = _refuse  # type: ignore[method-assign]
    running.cancel()
    for handle in (running, waiting):
        with pytest.raises(RequestFailed, match="TypeError: no text"):
            handle.result(PATIENCE_S)


def _refuse(*_: Any, **__: Any) -> None:
    raise TypeError("no text")


@pytest.mark.parametrize("unified", [False, True])
def test_failing_cache_costs_time_but_changes_no_text(make_engine: MakeEngine, unified: bool) -> None:
    def fault(place: str, _: Any) -> None:
        if place in ("save", "copy", "restore"):
            raise MemoryError

    engine, backend = make_engine(FaultyBackend(n_slots=2, unified=unified, ctx_per_slot=200, fault=fault))
    prompts = [f"{'the same beginning ' * 5}{i % 5}{i}" for i in range(12)]
    handles = [engine.submit(request(prompt, priority=9 - i % 10)) for i, prompt in enumerate(prompts)]
    assert [handle.result(PATIENCE_S).text for handle in handles] == texts_alone(prompts)
    wait_until(lambda: is_in_order(engine, backend), "all slots free")


class Failing(Strategy):
    """A user's strategy that fails after some batches, or returns invalid ones."""

    shares: list[TokenAllocation] | None = None
    where = "build_batch"

    def build_batch(
        self, slots: list[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        if self.shares is not None:
            return self.shares
        if self.where == "build_batch":
            raise KeyError("my strategy")
        return [(slots[0].slot, 1)]

    def observe(self, num_tokens: int, seconds: float) -> None:
        if self.where == "observe":
            raise KeyError("my strategy")

    def may_yield(self, num_tokens: int) -> bool:
        raise KeyError("my strategy")


@pytest.mark.parametrize("where", ["build_batch", "observe", "may_yield"])
def test_failing_strategy_is_replaced_without_stopping_any_request(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    monkeypatch.setattr(Failing, "where", where)
    engine, _ = make_engine(batch_strategy=f"{__name__}:Failing")
    prompts = ["one", "two two", "three"]
    handles = [engine.submit(request(prompt, priority=9)) for prompt in prompts]  # only bulk work may yield
    assert [handle.result(PATIENCE_S).text for handle in handles] == texts_alone(prompts)
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert logged[0].startswith("batch strategy failed (strategy=Failing, num_failures=1): decode_maximal is used")
    assert engine.snapshot().strategy_failures > 1  # it was called again, and failed again


class Learning(Strategy):
    """A strategy that records its observations."""

    told: ClassVar[list[tuple[int, float]]] = []

    def build_batch(
        self, slots: list[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        return [(view.slot, min(view.num_pending, 10)) for view in slots]

    def observe(self, num_tokens: int, seconds: float) -> None:
        self.told.append((num_tokens, seconds))


def test_strategy_observes_computed_steps_but_not_failed_steps(make_engine: MakeEngine) -> None:
    Learning.told = []
    engine, backend = make_engine(batch_strategy=f"{__name__}:Learning")
    steps: list[int] = []
    engine.add_step_listener(lambda step: steps.append(step.batch_size))
    backend.failures.extend([2, 0, -1, -1])  # aborted; computed; fails, and fails again alone
    with pytest.raises(DecodeFailed):
        engine.submit(request("x" * 30)).result(PATIENCE_S)
    wait_until(lambda: len(Learning.told) == 4, "four steps")
    assert [num_tokens for num_tokens, _ in Learning.told] == [0, 10, 0, 0]
    assert steps == [10]
    assert [seconds > 0 for _, seconds in Learning.told] == [False, True, False, False]


def test_failing_listeners_do_not_affect_requests(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    told: list[Any] = []
    for add in (engine.add_listener, engine.add_step_listener, engine.add_request_listener):
        add(_refuse)  # type: ignore[operator]
    engine.add_listener(told.extend)
    assert engine.submit(request()).result(PATIENCE_S).text == texts_alone(["hello"])[0]
    wait_until(lambda: any(isinstance(event, Finished) for event in told), "the end, for the other listener")


class Breaking(FakeBackend):
    """A backend that works until it is broken, and then fails in every step."""

    broken = False

    def trim(self, slot: int, num_tokens: int, checkpoint: FakeCheckpoint | None = None) -> bool:
        if self.broken:
            raise OSError("the device is gone")
        return super().trim(slot, num_tokens, checkpoint)

    def decode(self, *call: Any) -> None:
        if self.broken:
            raise OSError("the device is gone")
        super().decode(*call)


def test_broken_engine_fails_all_requests_and_reports_that_it_stopped(make_engine: MakeEngine) -> None:
    backend = Breaking(ctx_per_slot=10**6)
    engine, _ = make_engine(backend)
    handles = [engine.submit(request(name, max_tokens=10**6)) for name in "abcdef"]
    wait_until(lambda: engine.snapshot().slots_decoding == 4, "all slots busy")
    backend.broken = True
    for handle in handles:
        with pytest.raises(EngineStopped, match=r"the engine thread failed: OSError.*the device is gone"):
            handle.result(PATIENCE_S)
    wait_until(lambda: engine.snapshot().phase == "stopped", "the snapshot says so")
    with pytest.raises(EngineStopped):
        engine.submit(request())


def test_watched_engine_with_a_broken_backend_ends_the_process(
    make_engine: MakeEngine,
) -> None:
    engine, backend = make_engine()
    reasons: list[str] = []
    watchdog = Watchdog(end=reasons.append)
    watchdog.watch(engine.pulse)
    backend.failures.extend([-3] * 100)
    gate = Gate(backend)
    handles = [engine.submit(request(name)) for name in "abcdef"]
    gate.open.set()
    errors = [handle.future.exception(PATIENCE_S) for handle in handles]
    assert len(reasons) == 1
    assert "3 consecutive requests failed when retried individually" in reasons[0]
    assert [getattr(error, "code", None) for error in errors].count("decode_failed") == 2


@settings(max_examples=40 * EXAMPLES)
@given(
    seed=st.integers(0, 2**32),
    trim_fails=st.booleans(),
    rate=st.sampled_from([0.002, 0.02, 0.1]),
    unified=st.booleans(),
    partial_reuse=st.booleans(),
    specs=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=16
    ),
)
def test_requests_end_once_despite_random_faults_and_other_requests_are_unchanged(
    seed: int,
    trim_fails: bool,
    rate: float,
    unified: bool,
    partial_reuse: bool,
    specs: list[tuple[int, int, int, int]],
) -> None:
    """If not even a slot can be emptied, the engine may stop. Each request still gets exactly one terminal event."""
    rng = random.Random(seed)
    accepted: list[tuple[Request, Handle]] = []

    def fault(place: str, _: Any) -> None:
        if rng.random() < rate and (place != "trim" or trim_fails):
            raise rng.choice([RuntimeError, OverflowError, MemoryError, AssertionError])(place)
        if place == "decode" and rng.random() < rate:
            raise DecodeError(rng.choice([1, 2, -1, -3]))

    options = {"n_slots": 3, "ctx_per_slot": 120, "unified": unified, "partial_reuse": partial_reuse}
    backend = FaultyBackend(**options, n_cells=250 if unified else 0, fault=fault)
    asked = [
        request(f"{family} {'the beginning of it ' * 3}"[:length] + str(i), f"r{i}", priority=priority, n=n)
        for i, (family, length, priority, n) in enumerate(specs)
    ]
    engine, ends = Engine(backend, EngineOptions(n_parallel=3, n_batch=64, cache_ram_bytes=400)), []
    engine.add_listener(lambda events: ends.extend(e.request_id for e in events if isinstance(e, Finished)))
    with contextlib.suppress(EngineStopped):
        for each in asked:
            accepted.append((each, engine.submit(each)))
    errors = [handle.future.exception(PATIENCE_S) for _, handle in accepted]
    wait_until(lambda: len(ends) == len(accepted), "an end for every request")
    assert sorted(ends) == sorted(each.id for each, _ in accepted)
    stopped = any(isinstance(error, EngineStopped) for error in errors)
    assert trim_fails or not stopped
    if not stopped and len(accepted) == len(asked):
        wait_until(lambda: is_in_order(engine, backend), "all slots free")
    assert engine.close()
    calm = Engine(FakeBackend(n_slots=1, ctx_per_slot=120), EngineOptions(n_parallel=1, n_batch=64))
    for (each, handle), error in zip(accepted, errors, strict=True):
        if error is None:
            assert handle.result().tokens == calm.submit(each).result(PATIENCE_S).tokens
        else:
            assert isinstance(error, RequestFailed | DecodeFailed | EngineStopped)
    assert calm.close()

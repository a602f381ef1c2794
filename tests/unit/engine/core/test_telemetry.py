"""Telemetry of an engine: events of steps and requests, and snapshots that are right during a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from cellama.engine import (
    Embedder,
    Engine,
    EngineOptions,
    ManagerSnapshot,
    ModelSnapshot,
    RequestStats,
    Resumed,
    StepStats,
)
from cellama.engine.core import telemetry
from cellama.engine.core.telemetry import Rates
from cellama.engine.fake import FakeBackend, FakeEmbeddingBackend

from ....conftest import wait_until
from ...conftest import PATIENCE_S, Gate, MakeEngine, request

HEAD = "A prefix that is long enough to be worth keeping, which takes 64 tokens. "


@pytest.fixture
def embedder() -> Iterator[tuple[Embedder, threading.Event]]:
    """Return an embedder whose batches wait until the event is set."""
    backend, gate = FakeEmbeddingBackend(max_texts=1), threading.Event()
    embed = backend.embed
    backend.embed = lambda texts: embed(texts) if gate.wait(PATIENCE_S) else []  # type: ignore[method-assign]
    embedder = Embedder(backend)
    yield embedder, gate
    gate.set()
    assert embedder.close()


def test_active_slots_counts_busy_slots_even_without_tokens_in_the_batch(make_engine: MakeEngine) -> None:
    """A batch of 8 tokens has no room for the prompts of all three slots, which have 30 tokens each."""
    engine, backend = make_engine(FakeBackend(n_batch=8), n_ubatch=8, batch_strategy="prefill_priority")
    gate, steps = Gate(backend), list[StepStats]()
    engine.add_step_listener(steps.append)
    handles = [engine.submit(request(letter * 30, letter, max_tokens=50)) for letter in "abc"]
    gate.open.set()
    for handle in handles:
        handle.result(PATIENCE_S)
    assert engine.close()
    at_once = [step.active_slots for step in steps if step.prefill_tokens]
    assert at_once
    assert set(at_once[1:]) == {3}  # the first request may have arrived before the others
    assert {step.model for step in steps} == {"engine"}


def test_queue_depth_counts_requests_without_a_slot(make_engine: MakeEngine) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=1))
    gate, steps = Gate(backend), list[StepStats]()
    engine.add_step_listener(steps.append)
    handles = [engine.submit(request(f"{i}", n=n, max_tokens=2)) for i, n in enumerate((1, 1, 3))]
    gate.open.set()
    for handle in handles:
        handle.result(PATIENCE_S)
    assert engine.close()
    assert {step.active_slots for step in steps} == {1}
    assert [step.queue_depth for step in steps][:4] == [2, 2, 1, 1]  # the last token of a request has freed its slot


def test_request_events_name_the_model_and_the_mode() -> None:
    engine, ended = Engine(FakeBackend(), EngineOptions(n_parallel=4, n_batch=64), name="mine"), list[RequestStats]()
    engine.add_request_listener(ended.append)
    engine.generate(HEAD, max_tokens=3)
    list(engine.stream(HEAD + "More.", max_tokens=3))
    completion = engine.submit(request(stream=True, mode="generate", max_tokens=3)).result(PATIENCE_S)
    assert engine.close()
    assert [(stats.model, stats.mode, stats.seq_id) for stats in ended] == [
        ("mine", "generate", 0), ("mine", "stream", 0), ("mine", "generate", completion.slot),
    ]  # fmt: skip
    assert ended[1].prefix_cache_ratio == ended[1].prefix_cache_tokens / ended[1].prompt_tokens
    assert ended[1].prefix_cache_tokens == len(HEAD)
    assert (completion.mode, completion.timings.prefix_cache_ratio) == ("generate", 0.0)


def test_cache_ratio_of_a_resumed_request_is_relative_to_its_prompt(make_engine: MakeEngine) -> None:
    """The reused tokens include output, which is not a part of the prompt."""
    engine, _ = make_engine(FakeBackend(n_slots=1))
    whole = engine.submit(request(HEAD, max_tokens=30)).result(PATIENCE_S)
    resume = (Resumed(whole.tokens[:20]),)
    again = engine.submit(request(HEAD, max_tokens=30, resume=resume)).result(PATIENCE_S)
    assert again.text == whole.text
    assert (again.usage.cached_tokens, again.timings.prefix_cache_ratio) == (len(HEAD), 1.0)


def test_snapshot_is_correct_while_the_first_step_runs(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    gate = Gate(backend)
    handles = [engine.submit(request(f"prompt {i}", str(i))) for i in range(10)]
    assert gate.reached.wait(PATIENCE_S)
    busy = engine.snapshot()
    late = engine.submit(request("late", n=2))
    assert engine.snapshot().requests_waiting == busy.requests_waiting + 1
    gate.open.set()
    for handle in [*handles, late]:
        handle.result(PATIENCE_S)
    idle = engine.snapshot()
    assert busy.phase == "prefilling"
    assert (busy.slots_busy, busy.requests_running + busy.requests_waiting) == (busy.requests_running, 10)
    assert busy.requests_running >= 1  # the requests that had arrived when the step started
    assert (idle.phase, idle.slots_busy, idle.requests_running, idle.requests_waiting) == ("idle", 0, 0, 0)
    assert (idle.prompt_rate, idle.generation_rate, idle.requests_finished) == (0.0, 0.0, 11)


def test_request_with_several_completions_counts_as_one_request(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    gate = Gate(backend)
    handle = engine.submit(request(n=3))
    assert gate.reached.wait(PATIENCE_S)
    snapshot = engine.snapshot()
    gate.open.set()
    handle.result(PATIENCE_S)
    assert (snapshot.requests_running, snapshot.requests_waiting) == (1, 0)


def test_snapshot_counts_saves_evictions_and_hits_by_kind(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(n_slots=1), cache_ram_bytes=250)  # the fake's states have one byte per token
    for prompt in (HEAD, HEAD + "More.", "other " * 15, HEAD + "More.", "third " * 15, "a fourth " * 10, "last " * 20):
        engine.submit(request(prompt, max_tokens=3)).result(PATIENCE_S)
    told = engine.snapshot()
    assert (told.cache_hits_slot, told.cache_hits_copy, told.cache_hits_ram) == (1, 0, 1)
    assert told.cache_hits == 2
    assert told.cache_misses == 5
    assert told.ram_saves > told.ram_states
    assert told.ram_evictions >= 1
    both, backend = make_engine()
    gate = Gate(backend)
    handles = [both.submit(request(HEAD + name, name)) for name in "ab"]
    gate.open.set()
    for handle in handles:
        handle.result(PATIENCE_S)
    assert both.snapshot().cache_hits_copy == 1


def test_rates_are_measured_over_the_last_second_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: now)
    rates = Rates(0, 0)
    now = 100.5
    rates.measure(300, 10, idle=False, took_s=0.5)
    assert rates.per_s == (0.0, 0.0)
    now = 102.0
    rates.measure(1000, 40, idle=False)
    assert rates.per_s == (500.0, 20.0)
    rates.measure(1000, 40, idle=True)
    assert rates.per_s == (0.0, 0.0)
    now = 500.0  # a long pause does not count
    rates.measure(1100, 41, idle=False, took_s=0.25)
    assert rates.per_s == (0.0, 0.0)
    now = 501.75
    rates.measure(2000, 60, idle=False)
    assert rates.per_s == (500.0, 10.0)


def test_first_step_after_a_pause_is_counted_only_if_its_duration_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: now)
    rates = Rates(0)
    now = 500.0
    rates.measure(1000, idle=False)
    now = 502.0
    rates.measure(1200, idle=False)
    assert rates.per_s == (100.0,)


def test_prompt_rate_includes_only_computed_tokens(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "RATE_WINDOW_S", 0.0)
    engine, backend = make_engine()
    rates: list[float] = []
    engine.add_step_listener(lambda step: rates.append(engine.snapshot().prompt_rate))  # the rate of the previous step
    engine.submit(request("x" * 100, max_tokens=5)).result(PATIENCE_S)
    assert engine.close()
    assert rates[0] == 0.0
    assert rates[1] > 0
    assert rates[-1] == 0.0
    assert backend.closed


def test_embedder_snapshot_counts_running_and_waiting_texts(embedder: tuple[Embedder, threading.Event]) -> None:
    reader, gate = embedder
    first = reader.submit([[1], [2], [3]])
    wait_until(lambda: reader.snapshot().requests_running, "its first batch has started")
    others = [reader.submit([[4], [5]]), reader.submit([[6]])]
    cancelled = reader.submit([[7]])
    cancelled.cancel()
    told = reader.snapshot()
    assert (told.phase, told.requests_running, told.requests_waiting) == ("prefilling", 1, 2)
    assert told.texts_waiting == 2 + 2 + 1
    gate.set()
    for handle in (first, *others):
        handle.result(PATIENCE_S)
    done = reader.snapshot()
    assert (done.phase, done.requests_running, done.requests_waiting, done.texts_waiting) == ("idle", 0, 0, 0)
    assert (done.requests_finished, done.requests_failed, done.texts, done.prompt_tokens) == (3, 0, 6, 6)


def test_manager_snapshot_is_the_sum_of_all_engines_and_embedders(
    make_engine: MakeEngine, embedder: tuple[Embedder, threading.Event]
) -> None:
    engine, backend = make_engine()
    gate = Gate(backend)
    running = engine.submit(request())
    assert gate.reached.wait(PATIENCE_S)
    reader, open_reader = embedder
    open_reader.set()
    reader.submit([[1, 2]]).result(PATIENCE_S)
    models = [ModelSnapshot(engine.snapshot(), reader.snapshot(), None), ModelSnapshot(None, None, None)]
    totals = ManagerSnapshot.sum_of(models)
    gate.open.set()
    running.result(PATIENCE_S)
    assert (totals.phase, totals.models, totals.slots_busy, totals.slots_total) == ("prefilling", 2, 1, 4)
    assert (totals.requests_running, totals.requests_waiting, totals.requests_finished) == (1, 0, 1)
    assert totals.prompt_tokens == 2

"""The engine thread on the fake backend: batching, finish reasons, failures, telemetry."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from cellama.engine import (
    Completion,
    DecodeFailed,
    EngineStopped,
    Event,
    Finished,
    InvalidRequest,
    QueueFull,
    Request,
    RequestStats,
    Resumed,
    SamplingParams,
    Started,
    StepStats,
    Text,
)
from cellama.engine.fake import FakeBackend

from ....conftest import wait_until
from ...conftest import GREEDY, PATIENCE_S, Gate, MakeEngine, request


def test_engine_generates_the_same_text_for_concurrent_and_single_requests(make_engine: MakeEngine) -> None:
    prompts = [f"prompt number {i} " * (i % 7 + 1) for i in range(24)]
    alone, _ = make_engine(FakeBackend(n_slots=1))
    expected = [alone.submit(request(p)).result(PATIENCE_S).text for p in prompts]
    together, backend = make_engine(FakeBackend(n_slots=8), chunk_size=16)
    gate = Gate(backend)
    handles = [together.submit(request(p)) for p in prompts]
    gate.open.set()
    assert [h.result(PATIENCE_S).text for h in handles] == expected
    assert any(len(batch) == 8 for batch in backend.batches)


def test_engine_mixes_decode_and_prefill_in_one_step(make_engine: MakeEngine) -> None:
    engine, backend = make_engine(chunk_size=8)
    gate = Gate(backend)
    stats: list[StepStats] = []
    engine.add_step_listener(stats.append)
    handles = [engine.submit(request("x" * (1 + 30 * i))) for i in range(4)]
    gate.open.set()
    for handle in handles:
        handle.result(PATIENCE_S)
    mixed = [s for s in stats if s.decode_tokens and s.prefill_tokens]
    assert mixed
    assert all(s.batch_size == s.decode_tokens + s.prefill_tokens <= 64 for s in stats)
    assert wait_until(lambda: engine.snapshot().mixed_steps == len(mixed), "a snapshot after the last step")


def test_engine_emits_a_started_event_text_events_and_a_single_finished_event(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    told: list[tuple[Event, ...]] = []
    ended = threading.Event()
    engine.add_listener(lambda events: (told.append(events), ended.set() if _ends(events) else None))
    completion = engine.submit(request()).result(PATIENCE_S)
    assert ended.wait(PATIENCE_S)
    events = [event for step in told for event in step]
    texts = [event for event in events if isinstance(event, Text)]
    assert isinstance(events[0], Started)
    assert [type(e) for e in events[1:-1]] == [Text] * len(texts)
    assert events[-1] == Finished("r", completion)
    assert "".join(t.text for t in texts) == completion.text
    assert tuple(token for t in texts for token in t.tokens) == completion.tokens


def _ends(events: tuple[Event, ...]) -> bool:
    return any(isinstance(event, Finished) for event in events)


def test_engine_emits_no_text_events_when_the_request_does_not_stream(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    events: list[Event] = []
    completion = engine.submit(request(stream=False), events.append).result(PATIENCE_S)
    assert [type(event) for event in events] == [Started, Finished]
    assert len(completion.text) == 20


def test_engine_stops_at_a_stop_string_and_removes_it(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    whole = engine.submit(request()).result(PATIENCE_S).text
    events: list[Event] = []
    completion = engine.submit(request(stop=(whole[7:10],)), events.append).result(PATIENCE_S)
    assert (completion.text, completion.finish_reason, completion.stop_sequence) == (whole[:7], "stop", whole[7:10])
    assert "".join(e.text for e in events if isinstance(e, Text)) == whole[:7]


def test_engine_includes_the_stop_string_in_the_text_when_requested(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    whole = engine.submit(request(max_tokens=20)).result(PATIENCE_S).text
    events: list[Event] = []
    kept = request(stop=(whole[7:10],), include_stop_str_in_output=True)
    completion = engine.submit(kept, events.append).result(PATIENCE_S)
    assert (completion.text, completion.stop_sequence) == (whole[:10], whole[7:10])
    assert "".join(event.text for event in events if isinstance(event, Text)) == whole[:10]


def test_engine_stops_at_a_stop_token(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    whole = engine.submit(request(max_tokens=20)).result(PATIENCE_S).text
    token = ord(next(char for at, char in enumerate(whole) if at > 3 and char not in whole[:at]))
    at = whole.index(chr(token))
    sampling = replace(GREEDY, stop_token_ids=(token, 999))
    for include, text in ((False, whole[:at]), (True, whole[: at + 1])):
        stopping = request(sampling=sampling, include_stop_str_in_output=include)
        completion = engine.submit(stopping).result(PATIENCE_S)
        assert (completion.text, completion.finish_reason, completion.stop_sequence) == (text, "stop", None)
    resumed = replace(stopping, resume=(Resumed(tuple(whole[: at + 1].encode())),))
    assert engine.submit(resumed).result(PATIENCE_S).text == whole[: at + 1]


def test_engine_does_not_end_a_text_before_the_minimum_number_of_tokens(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(end_every=3))
    first = engine.submit(request(max_tokens=20)).result(PATIENCE_S)
    assert first.usage.completion_tokens < 12
    sampling = replace(GREEDY, min_tokens=12)
    longer = engine.submit(request(sampling=sampling)).result(PATIENCE_S)
    assert (longer.usage.completion_tokens >= 12, longer.finish_reason) == (True, "stop")
    stop = longer.text[4:6]
    assert stop not in longer.text[6:]
    stopped = engine.submit(request(sampling=sampling, stop=(stop, longer.text[11:13]))).result(PATIENCE_S)
    assert (stopped.text, stopped.stop_sequence) == (longer.text[:11], longer.text[11:13])


def test_engine_stops_at_the_end_token_unless_it_is_ignored(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(end_every=5))
    ended = engine.submit(request(max_tokens=200)).result(PATIENCE_S)
    assert ended.finish_reason == "stop"
    assert ended.usage.completion_tokens < 200
    ignoring = engine.submit(request(max_tokens=200, ignore_eos=True)).result(PATIENCE_S)
    assert (ignoring.finish_reason, ignoring.usage.completion_tokens) == ("length", 200)


def test_engine_finishes_with_length_when_the_slot_is_full(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(ctx_per_slot=32))
    completion = engine.submit(request("x" * 20, max_tokens=500)).result(PATIENCE_S)
    assert completion.finish_reason == "length"
    assert completion.usage.prompt_tokens + completion.usage.completion_tokens == 32
    assert engine.snapshot().kv_used_tokens == 0


def test_engine_generates_the_same_text_only_for_the_same_seed(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    texts = [engine.submit(request(sampling=SamplingParams(seed=seed))).result(PATIENCE_S).text for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_engine_frees_the_slot_of_a_cancelled_request_and_reports_its_cancellation(make_engine: MakeEngine) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=1, ctx_per_slot=10**7))
    running, waiting = [engine.submit(request(max_tokens=10**7, name=n)) for n in "ab"]
    gate = Gate(backend)
    assert gate.reached.wait(PATIENCE_S)
    waiting.cancel()
    running.cancel()
    running.cancel()
    gate.open.set()
    assert [h.result(PATIENCE_S).finish_reason for h in (running, waiting)] == ["cancelled", "cancelled"]
    assert waiting.result().slot is None
    assert engine.submit(request()).result(PATIENCE_S).finish_reason == "length"
    assert engine.snapshot().kv_used_tokens == 0


def test_engine_timeout_keeps_the_text_generated_so_far(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(ctx_per_slot=10**7))
    started = time.monotonic()
    completion = engine.submit(request(max_tokens=10**7, timeout_s=3.0)).result(PATIENCE_S)
    assert completion.finish_reason == "timeout"
    assert completion.text
    assert time.monotonic() - started >= 3.0


def test_listeners_are_notified_of_a_request_that_timed_out_before_it_had_a_slot(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    told: list[Event] = []
    engine.add_listener(told.extend)
    late = request("hi", timeout_s=5.0, submitted_at=time.monotonic() - 10)
    assert engine.submit(late).result(PATIENCE_S).finish_reason == "timeout"
    wait_until(lambda: any(isinstance(event, Finished) for event in told), "the end, although no step follows")


def test_engine_generate_raises_timeout_error_and_frees_the_slot(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(ctx_per_slot=10**7, n_slots=1))
    with pytest.raises(TimeoutError, match=r"longer than 0\.1 s"):
        engine.generate("hi", max_tokens=10**7, timeout_s=0.1)
    assert len(engine.generate("hi", max_tokens=5, ignore_eos=True)) == 5


@pytest.mark.parametrize("code", [1, -1, -3])
def test_engine_loses_no_tokens_when_a_batch_fails_once(make_engine: MakeEngine, code: int) -> None:
    prompts = ["one", "two two", "three three three"]
    alone, _ = make_engine()
    expected = [alone.submit(request(p)).result(PATIENCE_S).text for p in prompts]
    engine, backend = make_engine()
    gate = Gate(backend)
    handles = [engine.submit(request(p)) for p in prompts]
    backend.failures.extend([0, 0, code, 0, 0, 0, 0, code])
    gate.open.set()
    assert [h.result(PATIENCE_S).text for h in handles] == expected
    assert not backend.failures


def test_engine_retries_after_an_aborted_decode_call(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    expected = engine.submit(request()).result(PATIENCE_S).text
    backend.failures.extend([2, 0, 2])
    assert engine.submit(request()).result(PATIENCE_S).text == expected


def test_only_the_request_that_also_fails_alone_gets_an_error(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    backend.poison = ord("!")
    good = [engine.submit(request(f"good {i}")) for i in range(3)]
    bad = engine.submit(request("bad!"))
    with pytest.raises(DecodeFailed, match="for this request alone"):
        bad.result(PATIENCE_S)
    assert all(h.result(PATIENCE_S).finish_reason == "length" for h in good)
    wait_until(lambda: engine.snapshot().requests_failed == 1, "the snapshot says so")


def test_engine_continues_when_a_callback_fails(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    calls: list[Event] = []

    def bad(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("not ours")

    assert engine.submit(request(), bad).result(PATIENCE_S).finish_reason == "length"
    assert len(calls) == 1
    assert not engine.submit(request()).future.cancel()


def test_closing_the_engine_ends_running_and_waiting_requests(make_engine: MakeEngine) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=1, ctx_per_slot=10**7))
    handles = [engine.submit(request(max_tokens=10**7)) for _ in range(3)]
    assert engine.close()
    for handle in handles:
        with pytest.raises(EngineStopped):
            handle.result(PATIENCE_S)
    assert backend.closed


def test_engine_rejects_requests_that_can_never_run(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequest, match="maximum context length is 255 tokens"):
        engine.submit(request("x" * 256))
    with pytest.raises(InvalidRequest, match="token ids outside the range 0 to 256"):
        engine.submit(Request("r", (5, 999)))
    with pytest.raises(InvalidRequest, match="unknown parameter 'max_token'; did you mean 'max_tokens'"):
        engine.generate("hi", max_token=3)


@pytest.mark.parametrize(("completions", "accepted"), [((1,) * 7, 5), ((3,), 1), ((9,), 1), ((2, 2, 1, 1), 3)])
def test_max_queue_counts_only_requests_without_an_idle_slot(
    make_engine: MakeEngine, completions: tuple[int, ...], accepted: int
) -> None:
    engine, backend = make_engine(FakeBackend(n_slots=4), max_queue=1)
    gate = Gate(backend)
    handles = [engine.submit(request(f"{i}", n=n)) for i, n in enumerate(completions)]
    gate.open.set()
    for handle in handles[:accepted]:
        assert handle.result(PATIENCE_S).finish_reason == "length"
    for handle in handles[accepted:]:
        with pytest.raises(QueueFull, match="1 requests are already waiting, but the limit is 1"):
            handle.result(PATIENCE_S)


def test_engine_stream_yields_chunks_and_cancels_the_request_when_the_loop_exits(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(FakeBackend(ctx_per_slot=10**7))
    whole = engine.generate("hello", temperature=0, max_tokens=20)
    assert "".join(engine.stream("hello", temperature=0, max_tokens=20)) == whole
    stream = engine.stream("hello", temperature=0, max_tokens=10**7)
    assert next(stream) == whole[0]
    ended: list[RequestStats] = []
    cancelled = threading.Event()
    engine.add_request_listener(lambda stats: (ended.append(stats), cancelled.set()))
    stream.close()  # type: ignore[attr-defined]
    assert cancelled.wait(PATIENCE_S)
    assert (ended[0].finish_reason, ended[0].mode) == ("cancelled", "stream")


def test_engine_measures_request_times_from_submission(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    stats: list[RequestStats] = []
    engine.add_request_listener(stats.append)
    submitted_at = time.monotonic() - 5
    completion: Completion = engine.submit(request(submitted_at=submitted_at)).result(PATIENCE_S)
    assert stats[0].prompt_tokens == completion.usage.prompt_tokens == 5
    assert stats[0].generated_tokens == completion.usage.completion_tokens == 20
    assert stats[0].ttft_ms is not None
    assert 5000 <= completion.timings.delivery_ms <= completion.timings.queue_ms
    assert completion.timings.queue_ms <= stats[0].ttft_ms <= stats[0].duration_ms
    assert stats[0].prefix_cache_ratio == 0.0


def test_resumed_tokens_outside_the_vocabulary_are_rejected(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    with pytest.raises(InvalidRequest, match="resume has token ids outside the range 0 to 256"):
        engine.submit(request(resume=(Resumed((1, backend.n_vocab)),)))
    assert engine.submit(request()).result(PATIENCE_S).text


def test_number_of_threads_can_change_between_steps(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    gate = Gate(backend)
    handle = engine.submit(request())
    assert gate.reached.wait(PATIENCE_S)
    engine.use_threads(3)
    assert (engine.threads, backend.threads) == (3, 1)  # this step keeps its number of threads
    gate.open.set()
    handle.result(PATIENCE_S)
    assert backend.threads == 3

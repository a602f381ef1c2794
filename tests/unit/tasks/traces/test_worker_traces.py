"""Spans of attempts and requests have the right parents, times and attributes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from celery.exceptions import Ignore

from cellama.config import get_settings
from cellama.engine import Completion, DecodeFailed, Finished, InvalidRequest, Timings, Usage
from cellama.tasks.broker.pool import Interruption
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.kinds.chunk import TASK_CHUNK
from cellama.tasks.contract.kinds.embed import TASK_EMBED
from cellama.tasks.contract.kinds.generate import TASK_GENERATE
from cellama.tasks.middleware import AttemptContext
from cellama.tasks.state.history import Earlier
from cellama.tasks.state.ledger import Attempt, new_run
from cellama.tasks.traces import gate
from cellama.tasks.traces.tracing import Tracing, run_span_id
from cellama.tasks.worker.middlewares import start_middlewares
from cellama.tasks.worker.signing import Signer
from cellama.tasks.worker.traces import Traces

from ..attempt_contexts import context, running
from .conftest import ABOVE, Spans

JOB, ABOVE_ID = "a-job", 0x00F067AA0BA902B7
TIMINGS = Timings(30.0, 50.0, 90.0, None, None, delivery_ms=20.0)
COMPLETION = Completion("text", (1, 2), "stop", None, Usage(10, 2, 4), TIMINGS, 1, 7)


def attempt(number: int = 1, *before: Earlier, task: str = TASK_GENERATE, **parameters: Any) -> AttemptContext:
    """Return an attempt whose message carries the context of a trace."""
    return context(
        record=Attempt(JOB, new_run(), number, 1, "run", 2.0, before=before),
        task=task,
        headers=ABOVE,
        parameters={"model": "m", "prompt": "a secret", **parameters},
    )


def run(
    traces: Tracing,
    made: AttemptContext,
    *events: Finished,
    error: BaseException | None = None,
    interruption: Interruption | None = None,
    result: Any = None,
) -> None:
    """Run an attempt with these ends of requests and this end."""
    with running(Traces(traces, "w@here"), made, interruption) as middlewares:
        for event in events:
            middlewares.after_request(made.record.run_id, "m", event)
        made.result = result
        if error is not None:
            raise error


def finished(made: AttemptContext, completion: Completion | None = COMPLETION, line: str = "") -> Finished:
    error = None if completion is not None else DecodeFailed("no")
    return Finished(made.record.run_id + line, completion, error)


def test_request_span_contains_the_times_reported_by_the_engine(spans: Spans, traces: Tracing) -> None:
    made = attempt(max_tokens=5)
    run(traces, made, finished(made))
    process, request = spans.one("process q"), spans.one("text_completion m")
    assert process.parent.span_id == ABOVE_ID
    assert process.context.span_id == run_span_id(made.record.run)
    assert request.parent.span_id == process.context.span_id
    parts = [spans.one(name) for name in ("admission", "prefill", "decode")]
    base = request.start_time - 20_000_000
    assert [(p.start_time - base, p.end_time - base) for p in parts] == [
        (20_000_000, 30_000_000),
        (30_000_000, 50_000_000),
        (50_000_000, 90_000_000),
    ]
    assert {part.parent.span_id for part in parts} == {request.context.span_id}
    assert spans.one("result").parent.span_id == process.context.span_id
    attributes = request.attributes
    assert (
        attributes["gen_ai.usage.input_tokens"],
        attributes["gen_ai.usage.cache_read.input_tokens"],
    ) == (10, 4)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert "a secret" not in str([dict(span.attributes) for span in spans.all])


def test_spans_include_prompts_and_outputs_when_enabled(spans: Spans, settings_environment: Any) -> None:
    settings_environment(traces="true", trace_contents="true")
    traces = gate.tracing()
    assert traces is not None
    messages = [{"role": "user", "content": [{"type": "text", "text": "a secret"}]}]
    made = attempt(task="cellama.chat", messages=messages, system="be kind", prompt=None)
    run(traces, made, finished(made, replace(COMPLETION, reasoning="hm")))
    attributes = spans.one("chat m").attributes
    assert json.loads(attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "a secret"}]}
    ]
    assert json.loads(attributes["gen_ai.system_instructions"]) == [{"type": "text", "content": "be kind"}]
    (reply,) = json.loads(attributes["gen_ai.output.messages"])
    assert [part["content"] for part in reply["parts"]] == ["hm", "text"]


@pytest.mark.parametrize("is_lost", [True, False])
def test_attempt_links_to_the_previous_attempt_and_adds_the_span_of_a_lost_attempt(
    spans: Spans, traces: Tracing, is_lost: bool
) -> None:
    before = Earlier(new_run(), 1.5, 0.5, is_lost, "old@host 12 1.0")
    made = attempt(2, before)
    run(traces, made, finished(made))
    attempts = {span.context.span_id: span for span in spans.all if span.name == "process q"}
    own, lost = attempts[run_span_id(made.record.run)], attempts.get(run_span_id(before.run))
    assert [link.context.span_id for link in own.links] == [run_span_id(before.run)]
    waits = sorted((span.end_time - span.start_time) / 1e9 for span in spans.all if span.name == "queue")
    if not is_lost:
        assert (lost, waits) == (None, [0.5])
        return
    assert lost is not None
    assert lost.parent.span_id == ABOVE_ID
    assert (lost.end_time - lost.start_time) / 1e9 == pytest.approx(1.0)
    assert (lost.attributes["cellama.attempt.end"], lost.attributes["cellama.worker"]) == ("lost", "old@host")
    assert waits == pytest.approx([0.5, 0.5])  # the job was submitted 2 s before this attempt started


def test_trace_contains_all_attempts_of_a_job_that_crashed_several_workers(spans: Spans, traces: Tracing) -> None:
    before = [Earlier(new_run(), at, at - 0.25, True, f"w{at}@host 12 1.0") for at in (1.75, 1.0, 0.5)]
    run(traces, attempt(4, *before), error=JobFailed("dead", "no"))
    attempts = sorted((s for s in spans.all if s.name == "process q"), key=lambda s: s.start_time)
    assert [span.attributes["cellama.attempt.number"] for span in attempts] == [1, 2, 3, 4]
    assert [span.attributes["cellama.attempt.end"] for span in attempts] == ["lost"] * 3 + ["failure"]
    linked = [[link.context.span_id for link in span.links] for span in attempts]
    assert linked == [[], *([span.context.span_id] for span in attempts[:3])]
    waits = sorted((s for s in spans.all if s.name == "queue"), key=lambda s: s.start_time)
    attributes = [(span.end_time - span.start_time) / 1e9 for span in waits]
    assert attributes == pytest.approx([0.25, 0.5, 0.25, 0.25])


def test_superseded_attempt_gets_its_span_from_the_next_attempt(spans: Spans, traces: Tracing) -> None:
    run(traces, attempt(), error=Ignore(), interruption=Interruption.SUPERSEDED)
    assert spans.all == []


def test_span_of_a_failed_attempt_has_the_error_code(spans: Spans, traces: Tracing) -> None:
    made = attempt()
    run(traces, made, finished(made, None), error=JobFailed("decode_failed", "no"))
    for name in ("process q", "text_completion m"):
        span = spans.one(name)
        assert (span.attributes["error.type"], span.status.is_ok) == ("decode_failed", False)


def test_each_line_of_a_slice_has_a_request_span(spans: Spans, traces: Tracing) -> None:
    lines = [{"kind": "generate", "params": {"prompt": "x"}}, {"kind": "chat", "params": {"messages": []}}]
    made = attempt(task=TASK_CHUNK, lines=lines)
    run(traces, made, *(finished(made, line=f"\x1f{place}") for place in (0, 1)))
    found = {span.name: span.attributes["cellama.line"] for span in spans.all if "cellama.line" in span.attributes}
    assert found == {"text_completion m": 0, "chat m": 1}


def test_job_without_a_slot_gets_a_span_from_its_result(spans: Spans, traces: Tracing) -> None:
    run(traces, attempt(task=TASK_EMBED), result={"usage": {"prompt_tokens": 9}, "model": "m"})
    assert spans.one("embeddings m").attributes["gen_ai.usage.input_tokens"] == 9


def test_attempts_of_a_job_without_a_producer_span_share_one_trace(spans: Spans, traces: Tracing) -> None:
    for number in (1, 2):
        made = attempt(number)
        made.headers = {}
        run(traces, made)
    attempts = [span for span in spans.all if span.name == "process q"]
    assert len({span.context.trace_id for span in spans.all}) == 1
    assert [span.parent for span in attempts] == [None, None]
    assert len({span.context.span_id for span in attempts}) == 2


def test_unsampled_attempts_export_no_spans(spans: Spans, traces: Tracing) -> None:
    made = attempt()
    made.headers = {**ABOVE, "traceparent": ABOVE["traceparent"][:-1] + "0"}
    run(traces, made, finished(made))
    assert spans.all == []


def test_only_the_span_is_lost_when_the_end_of_a_request_is_invalid(spans: Spans, traces: Tracing) -> None:
    made = attempt(task=TASK_CHUNK, lines=[])
    run(traces, made, finished(made, line="\x1f3"))
    assert [span.name for span in spans.all] == ["queue", "process q"]


def test_worker_error_names_the_extra_when_packages_are_missing(
    monkeypatch: pytest.MonkeyPatch, settings_environment: Any
) -> None:
    settings_environment(traces="true")
    monkeypatch.delitem(sys.modules, "cellama.tasks.traces.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    gate._tracing.cache_clear()
    nothing: Any = None
    with pytest.raises(InvalidRequest, match=r"pip install 'cellama\[otel\]'"):
        start_middlewares(get_settings(), "w", manager=nothing, signer=Signer(None), samples=nothing)

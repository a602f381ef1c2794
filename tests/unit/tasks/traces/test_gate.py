"""Spans of producers exist only if traces are enabled, and jobs carry their context."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, messaging_attributes
from opentelemetry.semconv.schemas import Schemas

from cellama.config import SettingsError
from cellama.tasks.traces import gate, tracing as spans
from cellama.tasks.traces.conventions import NUMBERS, OPERATIONS, SCHEMA, USAGE, carried, of_message, of_request
from cellama.tasks.traces.gate import current_headers, current_trace_id, sending, trace_span, tracing

from .conftest import ABOVE, Spans

TRACE_ID = ABOVE["traceparent"].split("-")[1]


@pytest.fixture
def fresh() -> Iterator[None]:
    gate._tracing.cache_clear()
    yield
    gate._tracing.cache_clear()


def options(*job_ids: str, **headers: str) -> list[dict[str, Any]]:
    return [{"task_id": job_id, "queue": "q", "headers": dict(headers)} for job_id in job_ids]


def test_disabled_traces_import_nothing_and_add_no_header() -> None:
    code = """
import sys
from cellama.tasks.traces.gate import sending, tracing
assert tracing() is None
jobs = [{"task_id": "j", "queue": "q", "headers": {}}]
with sending(jobs):
    assert jobs[0]["headers"] == {}
assert not {"cellama.tasks.traces.tracing", "opentelemetry.sdk.trace"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_traces_setting_error_names_the_extra_when_packages_are_missing(
    settings_environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    settings_environment(traces="true")
    monkeypatch.delitem(sys.modules, "cellama.tasks.traces.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SettingsError, match=r"traces: true needs OpenTelemetry; run `pip install 'cellama\[otel\]'"):
        tracing()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, r"'zipkin' is not installed.*cellama\[otel\]"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "http/json.*http/protobuf or grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "'otlp_proto_grpc'"),
    ],
)
def test_missing_exporter_is_rejected_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=message):
        spans.make_provider()


def test_service_name_is_cellama_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert spans.make_provider().resource.attributes["service.name"] == "cellama"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    assert spans.make_provider().resource.attributes["service.name"] == "mine"


def test_jobs_sent_together_share_the_trace_context_of_one_span(spans: Spans) -> None:
    jobs = options("a", "b")
    with sending(jobs):
        pass
    sent = spans.one("send q")
    assert sent.attributes["messaging.batch.message_count"] == 2
    for job in jobs:
        _, trace_id, span_id, flags = job["headers"]["traceparent"].split("-")
        assert (int(trace_id, 16), int(span_id, 16)) == (sent.context.trace_id, sent.context.span_id)
        assert int(flags, 16) & 1


def test_sending_span_prefers_the_parent_in_the_header_over_the_current_span_and_the_running_job(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = SimpleNamespace(request=SimpleNamespace(traceparent=f"00-{'7' * 32}-{'8' * 16}-01", tracestate=None))
    monkeypatch.setattr(gate, "current_task", running)
    parents = []
    with trace_span("outer", {}):
        for given in (ABOVE, {}):
            with sending(options("a", **given)):
                pass
    with sending(options("a")):
        pass
    outer = spans.one("outer").context.span_id
    parents = [span.parent.span_id for span in spans.all if span.name == "send q"]
    assert parents == [0x00F067AA0BA902B7, outer, int("8" * 16, 16)]
    assert spans.all[0].context.trace_state.get("vendor") == "x"


def test_span_over_many_submissions_has_the_given_parent(spans: Spans) -> None:
    assert current_headers() == {}
    assert current_trace_id() == ""
    with trace_span("run", ABOVE) as own:
        assert current_headers() == own
        assert current_trace_id() == TRACE_ID
    assert spans.one("run").parent.span_id == 0x00F067AA0BA902B7


@pytest.mark.parametrize(
    "headers", [{}, {"tracestate": "a=b"}, {"traceparent": 5}, {"traceparent": "0" * 600}, {"traceparent": None}]
)
def test_malformed_context_is_ignored(headers: dict[str, Any]) -> None:
    assert carried(headers) == {}


def test_attribute_names_match_the_installed_conventions() -> None:
    modules = (gen_ai_attributes, messaging_attributes)
    known = [value for module in modules for value in vars(module).values() if isinstance(value, str)]
    names = {*NUMBERS.values(), *USAGE.values(), *of_message("q", "send", "j")}
    names |= of_request("chat", {"model": "m", "stop": "x"}).keys()
    assert names <= set(known)
    operations = {value.value for value in gen_ai_attributes.GenAiOperationNameValues}
    assert set(OPERATIONS.values()) - operations == {"rerank", "prefill"}
    assert SCHEMA in {schema.value for schema in Schemas}


def test_attributes_include_only_valid_call_parameters() -> None:
    parameters = {"model": "m", "temperature": "hot", "max_tokens": 5, "stop": ["a", 3], "prompt": "secret"}
    assert of_request("chat", parameters) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "cellama",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 5,
    }

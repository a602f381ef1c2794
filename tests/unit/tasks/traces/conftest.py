"""Fixtures that collect the spans of this process in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased

from cellama.tasks.traces import gate
from cellama.tasks.traces.tracing import Tracing

ABOVE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01", "tracestate": "vendor=x"}


class Spans:
    """The spans that were exported until now."""

    def __init__(self, sampled: bool = True) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=ParentBased(ALWAYS_ON if sampled else ALWAYS_OFF))
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def all(self) -> list[Any]:
        return list(self._exporter.get_finished_spans())

    def one(self, name: str) -> Any:
        (found,) = (span for span in self.all if span.name == name)
        return found


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch, settings_environment: Callable[..., None]) -> Iterator[Spans]:
    """Enable traces with a provider of this process, and collect its spans."""
    collected = Spans()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: collected.provider)
    settings_environment(traces="true")
    gate._tracing.cache_clear()
    yield collected
    gate._tracing.cache_clear()


@pytest.fixture
def traces(spans: Spans) -> Tracing:
    made = gate.tracing()
    assert made is not None
    return made

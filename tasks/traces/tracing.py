"""Create spans with OpenTelemetry's SDK, on the application's provider or on a provider configured by OTEL_*."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points, version
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cellama.config import SettingsError

from .conventions import SCHEMA, carried, of_message

SERVICE = "cellama"  # name of a service without OTEL_SERVICE_NAME
EXPORTERS = "opentelemetry_traces_exporter"  # group of entry points
OTLP_EXPORTERS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # entry points by protocol
W3C = TraceContextTextMapPropagator()
CLOSE_S = 3.0  # seconds to export the remaining spans when a process exits, in case the collector does not answer


class SpanIds(IdGenerator):
    """Derives the span ids of attempts from the attempts' run ids, so that other processes can link to these spans."""

    def __init__(self, generator: IdGenerator) -> None:
        self._generator = generator
        self._fixed = threading.local()

    @contextlib.contextmanager
    def fixed(self, run: str, job_id: str) -> Iterator[None]:
        """Within the block, derive this thread's span ids from `run`, and the ids of new traces from `job_id`."""
        self._fixed.ids = (run_span_id(run), int(hashlib.sha256(job_id.encode()).hexdigest()[:32], 16))
        try:
            yield
        finally:
            del self._fixed.ids

    def generate_span_id(self) -> int:
        ids: tuple[int, int] | None = getattr(self._fixed, "ids", None)
        return self._generator.generate_span_id() if ids is None else ids[0]

    def generate_trace_id(self) -> int:
        ids: tuple[int, int] | None = getattr(self._fixed, "ids", None)
        return self._generator.generate_trace_id() if ids is None else ids[1]

    def is_trace_id_random(self) -> bool:
        return self._generator.is_trace_id_random()


def run_span_id(run: str) -> int:
    """Return the id of an attempt's span, which is a part of its random run id in the ledger."""
    return int(run[:16], 16)


def make_provider() -> TracerProvider:
    """Create the provider of this process from the OTEL_* variables. Raises SettingsError."""
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
    provider = TracerProvider(resource=resource)
    for exporter in _exporters():
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporters() -> Iterator[SpanExporter]:
    """Yield the exporters that OTEL_TRACES_EXPORTER names (default: OTLP over HTTP)."""
    for name in map(str.strip, (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")):
        if name == "none":
            continue
        entry_name = _otlp_exporter() if name == "otlp" else name
        entry_point = next(iter(entry_points(group=EXPORTERS, name=entry_name)), None)
        if entry_point is None:
            raise SettingsError(
                f"OTEL_TRACES_EXPORTER: {entry_name!r} is not installed; run `pip install 'cellama[otel]'` for "
                "OTLP over HTTP, or set the variable to another exporter or to none"
            )
        yield entry_point.load()()


def _otlp_exporter() -> str:
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, variables)), "http/protobuf")
    if protocol not in OTLP_EXPORTERS:
        known = " or ".join(OTLP_EXPORTERS)
        raise SettingsError(f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not supported; set it to {known}")
    return OTLP_EXPORTERS[protocol]


class Tracing:
    """Creates the spans of a process. Any thread may use this class."""

    def __init__(self, *, contents: bool = False) -> None:
        """Use the application's provider, or create one. Raises SettingsError.

        With `contents`, spans include prompts and completions.
        """
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            provider = make_provider()
        self.contents = contents
        self._provider = provider
        self._ids = SpanIds(provider.id_generator)
        provider.id_generator = self._ids  # type: ignore[assignment]  # its declared type is too narrow
        self.tracer = provider.get_tracer("cellama", version("cellama"), schema_url=SCHEMA)

    @contextlib.contextmanager
    def sending(
        self, options: Sequence[Mapping[str, Any]], headers: Mapping[str, str], fallback: Mapping[str, str]
    ) -> Iterator[dict[str, str]]:
        """Create a span for sending jobs, and yield the headers for their messages.

        Its parent is the context in `headers`, or else the current span, or else the context in `fallback`.
        """
        parent = self.parent(headers) if headers else None
        if parent is None and not trace.get_current_span().get_span_context().is_valid:
            parent = self.parent(fallback)
        queue = options[0]["queue"]
        attributes = of_message(queue, "send", options[0]["task_id"] if len(options) == 1 else None)
        if len(options) > 1:
            attributes["messaging.batch.message_count"] = len(options)
        with self.tracer.start_as_current_span(
            f"send {queue}", context=parent, kind=SpanKind.PRODUCER, attributes=attributes
        ) as span:
            yield self.headers_of(span)

    def serving(self, name: str, headers: Mapping[str, str]) -> contextlib.AbstractContextManager[Span]:
        """Create the span for an HTTP request.

        Its parent is the current span, or else the client's context in `headers`.
        """
        has_current = trace.get_current_span().get_span_context().is_valid
        parent = None if has_current else self.parent(carried(headers))
        return self.tracer.start_as_current_span(name, context=parent, kind=SpanKind.SERVER)

    def parent(self, headers: Mapping[str, str]) -> Context:
        """Return the context in these headers.

        If the headers contain no context, spans that start in the returned context have no parent.
        """
        return W3C.extract(headers, context=Context())

    def headers_of(self, span: Span | None = None) -> dict[str, str]:
        """Return the headers that carry the context of this span, or of the current span."""
        headers: dict[str, str] = {}
        W3C.inject(headers, context=None if span is None else below(span))
        return headers

    def attempt(self, run: str, job_id: str, name: str, parent: Context, **options: Any) -> Span:
        """Start the span of an attempt, with an id derived from `run`. `options` are passed to OpenTelemetry."""
        with self._ids.fixed(run, job_id):
            return self.tracer.start_span(name, context=parent, kind=SpanKind.CONSUMER, **options)

    def link_to(self, run: str, span: Span) -> Link:
        """Return a link from a job's attempt to an earlier attempt, whose span another process may have created."""
        sampled, trace_id = TraceFlags(TraceFlags.SAMPLED), span.get_span_context().trace_id
        return Link(SpanContext(trace_id, run_span_id(run), is_remote=True, trace_flags=sampled))

    def close(self) -> None:
        """Export the remaining spans within `CLOSE_S` seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="cellama-traces-end", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def below(span: Span) -> Context:
    """Return a context in which this span is the parent of new spans."""
    return trace.set_span_in_context(span, Context())


def trace_id_of(span: Span) -> str:
    """Return the id of a span's trace in hex, as in logs."""
    return trace.format_trace_id(span.get_span_context().trace_id)

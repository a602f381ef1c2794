"""Makes spans: on the application's own provider if it has one, else on one of ours."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .attributes import SCHEMA, of_message
from .carrier import carried
from .provider import SpanIds, make_provider, run_span_id

W3C = TraceContextTextMapPropagator()
CLOSE_S = 3.0  # for spans that are left when a process ends: a collector that does not answer holds it up no longer


class Tracing:
    """One for a process. Any thread."""

    def __init__(self, *, contents: bool = False) -> None:
        """With `contents`, spans have prompts and completions. Raises SettingsError."""
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            provider = make_provider()
        self.contents = contents
        self._provider = provider
        self._ids = SpanIds(provider.id_generator)
        provider.id_generator = self._ids  # type: ignore[assignment]  # any generator will do
        self.tracer = provider.get_tracer("cellama", version("cellama"), schema_url=SCHEMA)

    @contextlib.contextmanager
    def sending(
        self, options: Sequence[Mapping[str, Any]], above: Mapping[str, str], else_above: Mapping[str, str]
    ) -> Iterator[dict[str, str]]:
        """A span of a sending, with what goes into the headers of its messages. `above` goes before the current span,
        that before `else_above`."""
        parent = self.parent(above) if above else None
        if parent is None and not trace.get_current_span().get_span_context().is_valid:
            parent = self.parent(else_above)
        queue = options[0]["queue"]
        attributes = of_message(queue, "send", options[0]["task_id"] if len(options) == 1 else None)
        if len(options) > 1:
            attributes["messaging.batch.message_count"] = len(options)
        with self.tracer.start_as_current_span(
            f"send {queue}", context=parent, kind=SpanKind.PRODUCER, attributes=attributes
        ) as span:
            yield self.headers_of(span)

    def serving(self, name: str, headers: Mapping[str, str]) -> contextlib.AbstractContextManager[Span]:
        """A span of an HTTP request; below the current one, where another application serves it, else the client's."""
        here = trace.get_current_span().get_span_context().is_valid
        parent = None if here else self.parent(carried(headers))
        return self.tracer.start_as_current_span(name, context=parent, kind=SpanKind.SERVER)

    def parent(self, headers: Mapping[str, str]) -> Context:
        """Return the context that these headers carry. Without one, spans that start in it have no parent."""
        return W3C.extract(headers, context=Context())

    def headers_of(self, span: Span | None = None) -> dict[str, str]:
        """Return the headers that carry the context of this span, or of the current one."""
        headers: dict[str, str] = {}
        W3C.inject(headers, context=None if span is None else below(span))
        return headers

    def attempt(self, run: str, job_id: str, name: str, parent: Context, **options: Any) -> Span:
        """Start the span of an attempt. Its id follows from its run. `options` are those of OpenTelemetry."""
        with self._ids.fixed(run, job_id):
            return self.tracer.start_span(name, context=parent, kind=SpanKind.CONSUMER, **options)

    def link_to(self, run: str, span: Span) -> Link:
        """Return a link from a job's attempt to an earlier one, whose span another process may have made."""
        own = span.get_span_context()
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return Link(SpanContext(own.trace_id, run_span_id(run), is_remote=True, trace_flags=sampled))

    def close(self) -> None:
        """Export the remaining spans, for `CLOSE_S` at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="cellama-traces-end", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def below(span: Span) -> Context:
    """Return the context of spans that have this one as their parent."""
    return trace.set_span_in_context(span, Context())


def trace_id_of(span: Span) -> str:
    """Return the trace id as logs and other programs write it."""
    return trace.format_trace_id(span.get_span_context().trace_id)

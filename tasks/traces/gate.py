"""Create spans for producers if the setting `traces` is true, and read the context of the current span."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery import current_task

from cellama.config import SettingsError, get_settings

from .conventions import NAMES, TRACEPARENT, carried

if TYPE_CHECKING:
    from .tracing import Tracing

REMEDY = "traces: true needs OpenTelemetry; run `pip install 'cellama[otel]'`, or set traces to false"


def tracing() -> Tracing | None:
    """Return this process's Tracing object, or None if the setting `traces` is false. Raises SettingsError."""
    settings = get_settings()
    return _tracing(settings.trace_contents) if settings.traces else None


@functools.cache
def _tracing(contents: bool) -> Tracing:
    try:
        from .tracing import Tracing  # needs an extra
    except ImportError as error:
        raise SettingsError(f"{REMEDY} ({error})") from None
    return Tracing(contents=contents)


@contextlib.contextmanager
def sending(options: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Create a span for sending these jobs, and add the span's context to the headers of their messages.

    `options` contains Celery's options for each job, with `task_id` and `headers`. The parent of the span is the
    context in the headers of the first job, or else the current span. If there is no current span, the parent is the
    span of the job that is running on this thread and sends its next task. If the setting `traces` is false, nothing is
    created.
    """
    traces = tracing() if options else None
    if traces is None:
        yield
        return
    request = getattr(current_task, "request", None)
    running = {name: getattr(request, name, None) for name in NAMES}
    context = carried(options[0]["headers"])
    with traces.sending(options, context, fallback=carried(running)) as headers:
        for each in options:
            each["headers"].update(headers)
        yield


@contextlib.contextmanager
def trace_span(name: str, headers: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Create a span for the body of the `with` statement, and yield the headers that carry the span's context.

    Its parent is the context in `headers`, or else the current span. If the setting `traces` is false, there is no
    span, and the headers are empty.
    """
    traces = tracing()
    if traces is None:
        yield {}
        return
    context = carried(headers)
    with traces.tracer.start_as_current_span(name, context=traces.parent(context) if context else None) as span:
        yield traces.headers_of(span)


def current_headers() -> dict[str, str]:
    """Return the headers that carry the context of the current span, or an empty dict if there is no span."""
    traces = tracing()
    return {} if traces is None else traces.headers_of()


def current_trace_id() -> str:
    """Return the id of the current trace in the format of logs, or "" if there is no trace."""
    traceparent = current_headers().get(TRACEPARENT, "")
    return traceparent.split("-")[1] if traceparent else ""

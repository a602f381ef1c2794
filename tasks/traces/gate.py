"""Whether this process makes spans, and the one that a sending of jobs has."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery import current_task

from cellama.config import SettingsError, get_settings

from .carrier import NAMES, TRACEPARENT, carried

if TYPE_CHECKING:
    from .tracing import Tracing

REMEDY = "traces is on and needs OpenTelemetry: `pip install 'cellama[otel]'`, or turn it off"


def tracing() -> Tracing | None:
    """What this process makes spans with; None: the setting `traces` is off. Raises SettingsError."""
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
    """A span of the sending of these jobs, whose messages have its context as headers; nothing without `traces`.

    `options` are Celery's, with `task_id` and `headers`. Above it is what the caller says in the headers of the first
    job, else the span that is current here, else the job that runs here, whose next step this is.
    """
    traces = tracing() if options else None
    if traces is None:
        yield
        return
    request = getattr(current_task, "request", None)
    running = {name: getattr(request, name, None) for name in NAMES}
    above = carried(options[0]["headers"])
    with traces.sending(options, above=above, else_above=carried(running)) as headers:
        for each in options:
            each["headers"].update(headers)
        yield


@contextlib.contextmanager
def spanning(name: str, headers: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """A span over all that is sent in here, below the context of these headers, else the current span; with what
    carries its own context elsewhere. Nothing without `traces`."""
    traces = tracing()
    if traces is None:
        yield {}
        return
    above = carried(headers)
    with traces.tracer.start_as_current_span(name, context=traces.parent(above) if above else None) as span:
        yield traces.headers_of(span)


def headers_here() -> dict[str, str]:
    """What carries the context of the current span elsewhere; nothing without `traces`, or without a span."""
    traces = tracing()
    return {} if traces is None else traces.headers_of()


def trace_id_here() -> str:
    """As logs have it; empty if there is none."""
    traceparent = headers_here().get(TRACEPARENT, "")
    return traceparent.split("-")[1] if traceparent else ""

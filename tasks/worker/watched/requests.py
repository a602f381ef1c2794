"""Spans of requests to engines, made when they end: from the times that the engine tells then."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from celery import Task
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from cellama.engine import Completion, Event, Finished
from cellama.tasks.contract.all_kinds import KINDS
from cellama.tasks.contract.kinds.chunk import TASK_CHUNK
from cellama.tasks.publishing.publisher import LINE_MARK
from cellama.tasks.traces.attributes import OPERATIONS, of_request, of_usage
from cellama.tasks.traces.tracing import Tracing, below

from .contents import asked_of, told_of

log = logging.getLogger(__name__)


class Run:
    """What is known of an attempt while it runs."""

    def __init__(self, span: Span, task: Task, began_ns: int, base_s: float) -> None:
        """`base_s` is the time, monotonic, that an engine's times count from: the submission of the job."""
        self.context = below(span)
        self.task = str(task.name)
        self.began_ns = began_ns
        self.base_ns = ns_of(base_s)
        self.ended_ns: int | None = None  # the last request
        self.result: Mapping[str, Any] | None = None
        request = task.request
        names = KINDS[self.task].positional
        self.parameters = {**dict(zip(names, request.args or (), strict=False)), **(request.kwargs or {})}

    def take_result(self, result: Any) -> None:
        self.result = result

    def asked(self, line: str) -> tuple[str | None, Mapping[str, Any]]:
        """The operation and the parameters of its request, or of that of one of its lines."""
        if self.task != TASK_CHUNK:
            return OPERATIONS.get(self.task), self.parameters
        told = self.parameters["lines"][int(line)]
        return OPERATIONS.get(f"cellama.{told['kind']}"), {"model": self.parameters["model"], **told["params"]}


class Requests:
    """Called with each event of an engine, on the publisher's thread."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._runs: dict[str, Run] = {}

    @contextlib.contextmanager
    def of(self, run_id: str, run: Run) -> Iterator[None]:
        """Requests of this run are told in here, if it is sampled."""
        if trace.get_current_span(run.context).is_recording():
            self._runs[run_id] = run
        try:
            yield
        finally:
            self._runs.pop(run_id, None)

    def base(self, run_id: str, base_s: float) -> None:
        """What the times of this run's requests count from, if not from its submission."""
        if (run := self._runs.get(run_id)) is not None:
            run.base_ns = ns_of(base_s)

    def __call__(self, model_id: str, event: Event) -> None:
        """It is in the way of all events: what goes wrong in here costs a span, and no event."""
        if not isinstance(event, Finished):
            return
        run_id, _, line = event.request_id.partition(LINE_MARK)
        if (run := self._runs.get(run_id)) is not None:
            try:
                self._tell(run, line, model_id, event)
            except Exception:
                log.exception("a request of run %s has no span", run_id)

    def _tell(self, run: Run, line: str, model_id: str, event: Finished) -> None:
        completion = event.completion
        operation, parameters = run.asked(line)
        attributes = {**of_request(str(operation), parameters), "gen_ai.response.model": model_id}
        if line:
            attributes["cellama.line"] = int(line)
        if completion is None:
            span = self._begin(run, f"{operation} {model_id}", attributes, run.began_ns)
            span.set_attribute("error.type", str(getattr(event.error, "code", "internal_error")))
            span.set_status(Status(StatusCode.ERROR))
            span.end()
            return
        if self._tracing.contents:
            attributes |= asked_of(parameters) | told_of(completion)
        self._tell_completion(run, f"{operation} {model_id}", attributes, completion)

    def _tell_completion(self, run: Run, name: str, attributes: dict[str, Any], completion: Completion) -> None:
        timings, parts = completion.timings, (completion, *completion.alternatives)
        whole_ms = max(part.timings.duration_ms for part in parts)
        attributes |= of_usage(asdict(completion.usage))
        attributes["gen_ai.response.finish_reasons"] = [part.finish_reason for part in parts]
        given_ms = min(timings.delivery_ms, timings.queue_ms)
        at = [run.base_ns + int(ms * 1e6) for ms in (given_ms, timings.queue_ms, whole_ms)]
        span = self._begin(run, name, attributes, at[0])
        inner = below(span)
        waited = {"cellama.prefix_wait_ms": timings.prefix_wait_ms} if timings.prefix_wait_ms else {}
        self._part(inner, "admission", at[0], at[1], waited)
        if completion.slot is not None:
            first = at[2] if timings.ttft_ms is None else run.base_ns + int(timings.ttft_ms * 1e6)
            self._part(inner, "prefill", at[1], first, {"cellama.slot": completion.slot})
            if timings.ttft_ms is not None:
                self._part(inner, "decode", first, at[2], {})
        span.end(at[2])
        run.ended_ns = at[2]

    def _begin(self, run: Run, name: str, attributes: dict[str, Any], at_ns: int) -> Span:
        return self._tracing.tracer.start_span(name, context=run.context, attributes=attributes, start_time=at_ns)

    def _part(self, context: Context, name: str, from_ns: int, to_ns: int, attributes: dict[str, Any]) -> None:
        span = self._tracing.tracer.start_span(name, context=context, attributes=attributes, start_time=from_ns)
        span.end(to_ns)

    def tell_rest(self, run: Run, now_ns: int) -> None:
        """At the end of an attempt: what its model read, if no event of an engine says that; and how long it took until
        the end was in Redis."""
        operation, result = OPERATIONS.get(run.task), run.result
        if run.ended_ns is None and operation is not None and result is not None:
            attributes = of_request(operation, run.parameters) | of_usage(result.get("usage", {}))
            model_id = str(result.get("model"))
            attributes["gen_ai.response.model"] = model_id
            self._begin(run, f"{operation} {model_id}", attributes, run.began_ns).end(now_ns)
        elif run.ended_ns is not None and run.task != TASK_CHUNK:
            self._part(run.context, "result", min(run.ended_ns, now_ns), now_ns, {})


def ns_of(monotonic_s: float) -> int:
    """A time of this machine's monotonic clock as one of its wall clock."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)

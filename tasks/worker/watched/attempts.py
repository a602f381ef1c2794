"""Spans of attempts: what a job waited, what each of its workers did for it, and what became of that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from celery import Task
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from cellama.config.logging import logging_about
from cellama.tasks.broker.pool import JobControl
from cellama.tasks.traces.attributes import of_message
from cellama.tasks.traces.carrier import NAMES, carried
from cellama.tasks.traces.tracing import Tracing, below, trace_id_of

from .ends import end_of
from .requests import Requests, Run

if TYPE_CHECKING:
    from cellama.tasks.state.history import Earlier
    from cellama.tasks.state.records import Attempt

LOST = "lost"
LOST_TEXT = "its worker died, or lost Redis, and told no end of it; its times are those of the ledger"


class AttemptTraces:
    """Makes the spans of attempts that end here, and of those before whose workers could tell none."""

    def __init__(self, tracing: Tracing, worker: str) -> None:
        self._tracing = tracing
        self._worker = worker
        self.requests = Requests(tracing)

    @contextlib.contextmanager
    def watching(
        self, task: Task, attempt: Attempt, control: JobControl, submitted_at: float
    ) -> Iterator[Callable[[Any], None]]:
        """Traces the attempt that runs in here, and gives what its result is told to."""
        began_ns, queue = time.time_ns(), str((task.request.delivery_info or {}).get("routing_key"))
        parent = self._tracing.parent(carried({name: getattr(task.request, name, None) for name in NAMES}))
        attributes = {**of_message(queue, "process", attempt.job_id), "cellama.task": task.name}
        name = f"process {queue}"
        own = {"cellama.attempt.number": attempt.number, "cellama.worker": self._worker}
        span = self._tracing.attempt(attempt.run, attempt.job_id, name, parent, attributes={**attributes, **own})
        run = Run(span, task, began_ns, submitted_at)
        with self.requests.of(attempt.run_id, run), logging_about(attempt.job_id, trace_id_of(span)):
            error: BaseException | None = None
            try:
                yield run.take_result
            except BaseException as raised:
                error = raised
                raise
            finally:
                end = end_of(error, control.interruption)
                if span.is_recording() and end != "superseded":  # the attempt after that one tells of it
                    self._tell_earlier(attempt, span, name, parent, began_ns, attributes)
                    self.requests.tell_rest(run, time.time_ns())
                    _end(span, end, error)

    def _tell_earlier(
        self, attempt: Attempt, span: Span, name: str, parent: Context, began_ns: int, attributes: dict[str, Any]
    ) -> None:
        """How long the job waited, and the attempts before this one of which no worker has told: the oldest first."""
        free_ns = began_ns - _ns(attempt.waited_s)  # since then no worker had it
        previous: Earlier | None = None
        for number, earlier in enumerate(attempt.before, start=attempt.number - len(attempt.before)):
            if earlier.is_lost:
                at_ns = began_ns - _ns(earlier.began_s)
                told = {**attributes, "cellama.attempt.number": number, "cellama.worker": earlier.worker.split()[0]}
                how: Any = {"attributes": {**told, "cellama.attempt.end": LOST}, "start_time": at_ns}
                lost = self._tracing.attempt(earlier.run, attempt.job_id, name, parent, **how)
                if previous is not None or number == 1:
                    self._wait(parent, lost, free_ns, at_ns)
                self._link(lost, previous)
                lost.set_status(Status(StatusCode.ERROR, LOST_TEXT))
                lost.end(began_ns - _ns(earlier.left_s))
            free_ns, previous = began_ns - _ns(earlier.left_s), earlier
        self._wait(parent, span, free_ns, began_ns)
        self._link(span, previous)

    def _link(self, span: Span, previous: Earlier | None) -> None:
        if previous is not None:
            span.add_link(self._tracing.link_to(previous.run, span).context)

    def _wait(self, parent: Context, span: Span, from_ns: int, to_ns: int) -> None:
        """Beside the attempt, below what sent the job; below the attempt if that is not known."""
        above = parent if trace.get_current_span(parent).get_span_context().is_valid else below(span)
        waiting = self._tracing.tracer.start_span("queue", context=above, start_time=min(from_ns, to_ns))
        waiting.end(to_ns)

    def close(self) -> None:
        """Exports what is left."""
        self._tracing.close()


def _end(span: Span, end: str, error: BaseException | None) -> None:
    span.set_attribute("cellama.attempt.end", end)
    if end == "failure":
        span.set_attribute("error.type", str(getattr(error, "code", type(error).__name__)))
        span.set_status(Status(StatusCode.ERROR))
    span.end()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

"""Create spans for attempts and for their requests to engines (docs/adr/024-traces.md).

The span of an attempt starts and ends with the attempt. Spans of requests are created when the requests end, from the
times that the engine reports. An attempt also creates the spans of earlier attempts whose workers crashed or lost the
connection to Redis.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from cellama.engine import Completion, Finished
from cellama.tasks.contract.kinds.chunk import TASK_CHUNK
from cellama.tasks.middleware import AttemptContext, Middleware
from cellama.tasks.publishing.publisher import LINE_MARK
from cellama.tasks.state.history import Earlier
from cellama.tasks.traces.conventions import NAMES, OPERATIONS, carried, of_message, of_request, of_usage
from cellama.tasks.traces.tracing import Tracing, below, trace_id_of

LOST = "lost"
LOST_TEXT = "the worker crashed or lost its Redis connection before it reported the end; the times are from the ledger"
MessagePart = dict[str, Any]


@dataclass(slots=True)
class TracedAttempt:
    """A running attempt with a sampled span. Times are Unix times in nanoseconds."""

    span: Span
    parent: Context  # from the headers of the message
    name: str
    attributes: dict[str, Any]  # for its span, and for the spans of earlier attempts
    started_ns: int
    last_request_ns: int | None = None  # end of its last request


class Traces(Middleware):
    """Creates the spans of one worker."""

    def __init__(self, tracing: Tracing, worker: str) -> None:
        self._tracing = tracing
        self._worker = worker
        self._attempts: dict[str, TracedAttempt] = {}  # by run id

    def close(self) -> None:
        """Export the remaining spans."""
        self._tracing.close()

    # Attempts

    def before_attempt(self, attempt: AttemptContext) -> None:
        record, name = attempt.record, f"process {attempt.queue}"
        parent = self._tracing.parent(carried({header: attempt.headers.get(header) for header in NAMES}))
        attributes = {**of_message(attempt.queue, "process", record.job_id), "cellama.task": attempt.task}
        attempt_attributes = {"cellama.attempt.number": record.number, "cellama.worker": self._worker}
        started_ns = time.time_ns()
        span = self._tracing.attempt(
            record.run, record.job_id, name, parent, attributes={**attributes, **attempt_attributes}
        )
        attempt.trace_id = trace_id_of(span)
        if span.is_recording():
            self._attempts[record.run_id] = TracedAttempt(
                span=span, parent=parent, name=name, attributes=attributes, started_ns=started_ns
            )

    def after_attempt(self, attempt: AttemptContext) -> None:
        traced = self._attempts.pop(attempt.record.run_id, None)
        if traced is None or attempt.end == "superseded":  # the span of a superseded attempt comes from the next one
            return
        self._add_earlier(traced, attempt)
        self._add_result(traced, attempt, time.time_ns())
        traced.span.set_attribute("cellama.attempt.end", str(attempt.end))
        if attempt.end == "failure":
            code = getattr(attempt.error, "code", type(attempt.error).__name__)
            traced.span.set_attribute("error.type", str(code))
            traced.span.set_status(Status(StatusCode.ERROR))
        traced.span.end()

    def _add_earlier(self, traced: TracedAttempt, attempt: AttemptContext) -> None:
        """Add spans for the job's waits, and for earlier attempts that no worker reported, oldest first."""
        record, started_ns = attempt.record, traced.started_ns
        free_ns = started_ns - _ns(record.waited_s)  # the time since which no worker has run the job
        previous: Earlier | None = None
        for number, earlier in enumerate(record.before, start=record.number - len(record.before)):
            if earlier.is_lost:
                at_ns = started_ns - _ns(earlier.began_s)
                attributes = {
                    "cellama.attempt.number": number,
                    "cellama.worker": earlier.worker.split()[0],
                    "cellama.attempt.end": LOST,
                }
                lost = self._tracing.attempt(
                    earlier.run,
                    record.job_id,
                    traced.name,
                    traced.parent,
                    attributes={**traced.attributes, **attributes},
                    start_time=at_ns,
                )
                if previous is not None or number == 1:
                    self._add_wait(traced.parent, lost, free_ns, at_ns)
                self._link(lost, previous)
                lost.set_status(Status(StatusCode.ERROR, LOST_TEXT))
                lost.end(started_ns - _ns(earlier.ended_s))
            free_ns, previous = started_ns - _ns(earlier.ended_s), earlier
        self._add_wait(traced.parent, traced.span, free_ns, started_ns)
        self._link(traced.span, previous)

    def _link(self, span: Span, previous: Earlier | None) -> None:
        if previous is not None:
            span.add_link(self._tracing.link_to(previous.run, span).context)

    def _add_wait(self, parent: Context, span: Span, from_ns: int, to_ns: int) -> None:
        """Add a span for a wait in the queue, whose parent is the sender's span, or by default the attempt's span."""
        above = parent if trace.get_current_span(parent).get_span_context().is_valid else below(span)
        self._add(above, "queue", min(from_ns, to_ns), to_ns)

    def _add_result(self, traced: TracedAttempt, attempt: AttemptContext, now_ns: int) -> None:
        """Add a span for writing the result.

        If no engine request has ended, add a span for the model's computation instead.
        """
        operation, result, last_ns = OPERATIONS.get(attempt.task), attempt.result, traced.last_request_ns
        if last_ns is None and operation is not None and result is not None:
            attributes = of_request(operation, attempt.parameters) | of_usage(result.get("usage", {}))
            model_id = str(result.get("model"))
            attributes["gen_ai.response.model"] = model_id
            self._add(below(traced.span), f"{operation} {model_id}", traced.started_ns, now_ns, attributes)
        elif last_ns is not None and attempt.task != TASK_CHUNK:
            self._add(below(traced.span), "result", min(last_ns, now_ns), now_ns)

    # Requests

    def after_request(self, model_id: str, end: Finished, attempt: AttemptContext | None) -> None:
        traced = None if attempt is None else self._attempts.get(attempt.record.run_id)
        if attempt is None or traced is None:
            return
        line, completion = end.request_id.partition(LINE_MARK)[2], end.completion
        operation, parameters = _operation_of(attempt, line)
        name = f"{operation} {model_id}"
        attributes = {**of_request(str(operation), parameters), "gen_ai.response.model": model_id}
        if line:
            attributes["cellama.line"] = int(line)
        if completion is None:
            span = self._start(below(traced.span), name, traced.started_ns, attributes)
            span.set_attribute("error.type", str(getattr(end.error, "code", "internal_error")))
            span.set_status(Status(StatusCode.ERROR))
            span.end()
            return
        if self._tracing.contents:
            attributes |= prompt_of(parameters) | generated_of(completion)
        self._add_completion(traced, ns_of(attempt.requests_from), name, attributes, completion)

    def _add_completion(
        self, traced: TracedAttempt, base_ns: int, name: str, attributes: dict[str, Any], completion: Completion
    ) -> None:
        """Add the spans of a completed request. The engine's times are relative to `base_ns`."""
        timings, completions = completion.timings, (completion, *completion.alternatives)
        attributes |= of_usage(asdict(completion.usage))
        attributes["gen_ai.response.finish_reasons"] = [each.finish_reason for each in completions]
        submitted_ns = base_ns + int(min(timings.delivery_ms, timings.queue_ms) * 1e6)
        admitted_ns = base_ns + int(timings.queue_ms * 1e6)
        ended_ns = base_ns + int(max(each.timings.duration_ms for each in completions) * 1e6)
        span = self._start(below(traced.span), name, submitted_ns, attributes)
        inner = below(span)
        prefix_wait = {"cellama.prefix_wait_ms": timings.prefix_wait_ms} if timings.prefix_wait_ms else {}
        self._add(inner, "admission", submitted_ns, admitted_ns, prefix_wait)
        if completion.slot is not None:
            first_ns = ended_ns if timings.ttft_ms is None else base_ns + int(timings.ttft_ms * 1e6)
            self._add(inner, "prefill", admitted_ns, first_ns, {"cellama.slot": completion.slot})
            if timings.ttft_ms is not None:
                self._add(inner, "decode", first_ns, ended_ns)
        span.end(ended_ns)
        traced.last_request_ns = ended_ns

    def _start(self, parent: Context, name: str, at_ns: int, attributes: Mapping[str, Any]) -> Span:
        return self._tracing.tracer.start_span(name, context=parent, attributes=attributes, start_time=at_ns)

    def _add(
        self, parent: Context, name: str, from_ns: int, to_ns: int, attributes: Mapping[str, Any] | None = None
    ) -> None:
        self._start(parent, name, from_ns, attributes or {}).end(to_ns)


def _operation_of(attempt: AttemptContext, line: str) -> tuple[str | None, Mapping[str, Any]]:
    """Return a request's operation and parameters.

    If `line` is given, return the operation and parameters of this line of a chunk.
    """
    if attempt.task != TASK_CHUNK:
        return OPERATIONS.get(attempt.task), attempt.parameters
    record = attempt.parameters["lines"][int(line)]
    return OPERATIONS.get(f"cellama.{record['kind']}"), {"model": attempt.parameters["model"], **record["params"]}


def ns_of(monotonic_s: float) -> int:
    """Convert a monotonic time in seconds into a Unix time in nanoseconds."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


# Prompts and generated texts, in the message format of OpenTelemetry's conventions


def prompt_of(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the span attributes that contain a chat's messages, or the prompt."""
    attributes = {}
    if parameters.get("system") is not None:
        attributes["gen_ai.system_instructions"] = json.dumps(_texts(parameters["system"]))
    messages = parameters.get("messages")
    if messages is None and parameters.get("prompt") is not None:
        messages = [{"role": "user", "content": parameters["prompt"]}]
    if messages is not None:
        attributes["gen_ai.input.messages"] = json.dumps([_message(message) for message in messages])
    return attributes


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts: list[MessagePart] = []
    if message.get("role") == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
    elif content is not None:
        parts += _texts(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        parts.append({"type": "tool_call", "id": call.get("id"), **function})
    return {"role": message.get("role"), "parts": parts}


def _texts(content: Any) -> list[MessagePart]:
    """Convert a string, content parts in OpenAI's format, or token ids into message parts in OpenTelemetry's format."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return [{"type": "text", "content": part.get("text")} for part in content]
    return [{"type": "text" if isinstance(content, str) else "tokens", "content": content}]


def generated_of(completion: Completion) -> dict[str, str]:
    """Return the span attribute that contains the generated messages."""
    messages = [_reply(part) for part in (completion, *completion.alternatives)]
    return {"gen_ai.output.messages": json.dumps(messages)}


def _reply(completion: Completion) -> dict[str, Any]:
    parts: list[MessagePart] = []
    if completion.reasoning is not None:
        parts.append({"type": "reasoning", "content": completion.reasoning})
    if completion.text:
        parts.append({"type": "text", "content": completion.text})
    for call in completion.tool_calls:
        parts.append({"type": "tool_call", "name": call.name, "arguments": call.arguments})
    return {"role": "assistant", "parts": parts, "finish_reason": completion.finish_reason}

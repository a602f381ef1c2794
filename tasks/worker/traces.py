"""Spans of attempts and of requests to engines (docs/adr/024-traces.md).

A span of an attempt begins and ends with it. Spans of requests are made when the requests end, from the times that the
engine reports then. An attempt also makes the spans of earlier ones whose workers could not: they died, or lost Redis.
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
from cellama.tasks.traces.attributes import OPERATIONS, of_message, of_request, of_usage
from cellama.tasks.traces.carrier import NAMES, carried
from cellama.tasks.traces.tracing import Tracing, below, trace_id_of

LOST = "lost"
LOST_TEXT = "its worker died, or lost Redis, and told no end of it; its times are those of the ledger"
Part = dict[str, Any]


@dataclass(slots=True)
class TracedAttempt:
    """What is known of an attempt while it runs."""

    span: Span
    parent: Context  # what the message carries
    name: str
    attributes: dict[str, Any]  # of the span, and of spans of earlier attempts
    began_ns: int
    last_request_ns: int | None = None  # when its last request ended


class Traces(Middleware):
    """Makes the spans of one worker."""

    def __init__(self, tracing: Tracing, worker: str) -> None:
        self._tracing = tracing
        self._worker = worker
        self._attempts: dict[str, TracedAttempt] = {}  # those that are sampled, by run id

    def close(self) -> None:
        """Export what is left."""
        self._tracing.close()

    # Attempts

    def before_attempt(self, attempt: AttemptContext) -> None:
        record, name = attempt.record, f"process {attempt.queue}"
        parent = self._tracing.parent(carried({header: attempt.headers.get(header) for header in NAMES}))
        attributes = {**of_message(attempt.queue, "process", record.job_id), "cellama.task": attempt.task}
        own = {"cellama.attempt.number": record.number, "cellama.worker": self._worker}
        began_ns = time.time_ns()
        span = self._tracing.attempt(record.run, record.job_id, name, parent, attributes={**attributes, **own})
        attempt.trace_id = trace_id_of(span)
        if span.is_recording():
            self._attempts[record.run_id] = TracedAttempt(
                span=span, parent=parent, name=name, attributes=attributes, began_ns=began_ns
            )

    def after_attempt(self, attempt: AttemptContext) -> None:
        traced = self._attempts.pop(attempt.record.run_id, None)
        if traced is None or attempt.end == "superseded":  # the attempt after that one has a span that tells of it
            return
        self._add_earlier(traced, attempt)
        self._add_rest(traced, attempt, time.time_ns())
        traced.span.set_attribute("cellama.attempt.end", str(attempt.end))
        if attempt.end == "failure":
            code = getattr(attempt.error, "code", type(attempt.error).__name__)
            traced.span.set_attribute("error.type", str(code))
            traced.span.set_status(Status(StatusCode.ERROR))
        traced.span.end()

    def _add_earlier(self, traced: TracedAttempt, attempt: AttemptContext) -> None:
        """Add how long the job waited, and the attempts before this one that no worker reported, the oldest first."""
        record, began_ns = attempt.record, traced.began_ns
        free_ns = began_ns - _ns(record.waited_s)  # since then no worker had it
        previous: Earlier | None = None
        for number, earlier in enumerate(record.before, start=record.number - len(record.before)):
            if earlier.is_lost:
                at_ns = began_ns - _ns(earlier.began_s)
                about = {
                    "cellama.attempt.number": number,
                    "cellama.worker": earlier.worker.split()[0],
                    "cellama.attempt.end": LOST,
                }
                lost = self._tracing.attempt(
                    earlier.run,
                    record.job_id,
                    traced.name,
                    traced.parent,
                    attributes={**traced.attributes, **about},
                    start_time=at_ns,
                )
                if previous is not None or number == 1:
                    self._add_wait(traced.parent, lost, free_ns, at_ns)
                self._link(lost, previous)
                lost.set_status(Status(StatusCode.ERROR, LOST_TEXT))
                lost.end(began_ns - _ns(earlier.left_s))
            free_ns, previous = began_ns - _ns(earlier.left_s), earlier
        self._add_wait(traced.parent, traced.span, free_ns, began_ns)
        self._link(traced.span, previous)

    def _link(self, span: Span, previous: Earlier | None) -> None:
        if previous is not None:
            span.add_link(self._tracing.link_to(previous.run, span).context)

    def _add_wait(self, parent: Context, span: Span, from_ns: int, to_ns: int) -> None:
        """Next to the attempt, below what sent the job; below the attempt if that is not known."""
        above = parent if trace.get_current_span(parent).get_span_context().is_valid else below(span)
        self._add(above, "queue", min(from_ns, to_ns), to_ns)

    def _add_rest(self, traced: TracedAttempt, attempt: AttemptContext, now_ns: int) -> None:
        """Add what the model computed, if no end of a request says that; else how long it took until the end was in
        Redis."""
        operation, result, last_ns = OPERATIONS.get(attempt.task), attempt.result, traced.last_request_ns
        if last_ns is None and operation is not None and result is not None:
            attributes = of_request(operation, attempt.parameters) | of_usage(result.get("usage", {}))
            model_id = str(result.get("model"))
            attributes["gen_ai.response.model"] = model_id
            self._add(below(traced.span), f"{operation} {model_id}", traced.began_ns, now_ns, attributes)
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
            span = self._start(below(traced.span), name, traced.began_ns, attributes)
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
        """The engine's times count from `base_ns`."""
        timings, parts = completion.timings, (completion, *completion.alternatives)
        attributes |= of_usage(asdict(completion.usage))
        attributes["gen_ai.response.finish_reasons"] = [part.finish_reason for part in parts]
        given_ns = base_ns + int(min(timings.delivery_ms, timings.queue_ms) * 1e6)
        admitted_ns = base_ns + int(timings.queue_ms * 1e6)
        ended_ns = base_ns + int(max(part.timings.duration_ms for part in parts) * 1e6)
        span = self._start(below(traced.span), name, given_ns, attributes)
        inner = below(span)
        waited = {"cellama.prefix_wait_ms": timings.prefix_wait_ms} if timings.prefix_wait_ms else {}
        self._add(inner, "admission", given_ns, admitted_ns, waited)
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
    """The operation and the parameters of an attempt's request, or of the request of one of its lines."""
    if attempt.task != TASK_CHUNK:
        return OPERATIONS.get(attempt.task), attempt.parameters
    asked = attempt.parameters["lines"][int(line)]
    return OPERATIONS.get(f"cellama.{asked['kind']}"), {"model": attempt.parameters["model"], **asked["params"]}


def ns_of(monotonic_s: float) -> int:
    """A time of this machine's monotonic clock as one of its wall clock."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


# Prompts and what was generated, as OpenTelemetry's conventions write messages


def prompt_of(parameters: Mapping[str, Any]) -> dict[str, str]:
    """The messages of a chat, or the prompt."""
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
    parts: list[Part] = []
    if message.get("role") == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
    elif content is not None:
        parts += _texts(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        parts.append({"type": "tool_call", "id": call.get("id"), **function})
    return {"role": message.get("role"), "parts": parts}


def _texts(content: Any) -> list[Part]:
    """A text; OpenAI's parts, which have their text under another name; or token ids."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return [{"type": "text", "content": part.get("text")} for part in content]
    return [{"type": "text" if isinstance(content, str) else "tokens", "content": content}]


def generated_of(completion: Completion) -> dict[str, str]:
    """What was generated."""
    messages = [_reply(part) for part in (completion, *completion.alternatives)]
    return {"gen_ai.output.messages": json.dumps(messages)}


def _reply(completion: Completion) -> dict[str, Any]:
    parts: list[Part] = []
    if completion.reasoning is not None:
        parts.append({"type": "reasoning", "content": completion.reasoning})
    if completion.text:
        parts.append({"type": "text", "content": completion.text})
    for call in completion.tool_calls:
        parts.append({"type": "tool_call", "name": call.name, "arguments": call.arguments})
    return {"role": "assistant", "parts": parts, "finish_reason": completion.finish_reason}

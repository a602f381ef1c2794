"""Convert the engine's reports into the results and events of the contract. Only workers use this module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

from cellama import engine
from cellama.engine import (
    Completion,
    EngineError,
    Event as EngineEvent,
    Finished,
    Resumed,
    Started,
    Text,
    TokenLogprob,
    ToolCallDelta as CallDelta,
)
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.contract.events import DoneDetails, ErrorEvent, Event, Failure, OutputDetails, TerminalEvent
from cellama.tasks.contract.json_values import valid_text
from cellama.tasks.contract.keys import context_key
from cellama.tasks.contract.kinds.generate import GenerateResult
from cellama.tasks.contract.shapes.results import (
    CompletionChoice,
    Function,
    Logprob,
    Timings,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from cellama.tasks.state.contexts import KeptContext, pack, pack_after
from cellama.tasks.state.history import Output, Past, outputs_of_line

Sign = Callable[[str], str]  # the signature of reasoning
USAGE = tuple(field.name for field in fields(engine.Usage))
TIMINGS = tuple(field.name for field in fields(engine.Timings))
CALL_ID_CHARS = 9  # the length that Mistral's templates require
MAX_WARNINGS = 32  # per result, more than anyone reads
MAX_WARNING_CHARS = 300  # per warning, because names of properties may be long


def event_of(event: EngineEvent, model_id: str, worker: str, sign: Sign, job_id: str) -> Event:
    """Convert an engine's event into an event that readers receive."""
    if isinstance(event, Started):
        return events.started(model_id, event.num_prompt_tokens, worker, event.seed)
    if isinstance(event, Text):
        details: OutputDetails = {"index": event.index} if event.index else {}
        if event.logprobs:
            details["logprobs"] = _logprobs(event.logprobs)
        if event.mirostat_mu is not None:
            details["mirostat_mu"] = event.mirostat_mu
        if event.kind == "reasoning_end":
            return events.reasoning_end(sign(event.text), list(event.tokens), **details)
        if event.kind == "reasoning":
            return events.reasoning(event.text, list(event.tokens), **details)
        made = events.token(event.text, list(event.tokens), **details)
        if event.calls:
            made["tool_call_deltas"] = [_delta(delta, job_id, event.index) for delta in event.calls]
        return made
    return _terminal_event(event, job_id)


def _delta(delta: CallDelta, job_id: str, index: int) -> ToolCallDelta:
    made: ToolCallDelta = {"index": delta.number, "arguments": delta.arguments}
    if delta.name:
        made["id"], made["name"] = _call_id(job_id, index, delta.number), delta.name
    return made


def _terminal_event(event: Finished, job_id: str) -> TerminalEvent:
    if event.error is not None:
        return error_event(failure_of(event.error))
    completion = event.completion
    assert completion is not None
    details: DoneDetails = {
        "stop_sequence": completion.stop_sequence,
        "timings": _timings(completion),
        "seed": completion.seed,
        "seq_id": completion.slot,
        "mode": completion.mode,
    }
    if completion.tool_calls:
        details["tool_calls"] = _tool_calls(completion, partial(_call_id, job_id, 0))
    if completion.finish_key is not None:
        details["finish_key"] = completion.finish_key
    if completion.warnings:
        details["warnings"] = _warnings(completion)
    return events.done(completion.finish_reason, _usage(completion), **details)


def result_of(completion: Completion, model_id: str, sign: Sign, job_id: str, first_index: int = 0) -> GenerateResult:
    """Return the result of a generation: the first completion, and all completions as `choices` if there are several.

    Fields that exist only for chats are stored next to the text, until `with_messages` moves them into the message.
    `first_index` is the index of the first completion in the events of the job.
    """

    def choice_of(choice: Completion) -> dict[str, Any]:
        return _choice(choice, sign, with_tokens, partial(_call_id, job_id, first_index + choice.index))

    with_tokens = completion.context_tokens is not None
    fields_of_result: Any = {
        **choice_of(completion),
        "usage": _usage(completion),
        "timings": _timings(completion),
        "model": model_id,
        "seq_id": completion.slot,
        "seed": completion.seed,
        "mode": completion.mode,
        "cache_hit_kind": completion.usage.cache_hit_kind,
    }
    if completion.context_tokens is not None:
        fields_of_result["context_tokens"] = list(completion.context_tokens)
    if completion.warnings:
        fields_of_result["warnings"] = _warnings(completion)
    result = cast(GenerateResult, fields_of_result)
    if completion.alternatives:
        result["choices"] = [
            cast(CompletionChoice, {"index": choice.index, **choice_of(choice)})
            for choice in (completion, *completion.alternatives)
        ]
    return result


def result_of_end(
    event: EngineEvent, model_id: str, sign: Sign, job_id: str, first_index: int = 0
) -> GenerateResult | None:
    """Return the result of a finished request, or None if the event does not end a request successfully."""
    completion = event.completion if isinstance(event, Finished) else None
    if completion is None or completion.finish_reason == "cancelled":
        return None
    return result_of(completion, model_id, sign, job_id, first_index)


def contexts_of(event: EngineEvent, fingerprint: str) -> tuple[tuple[str, bytes], ...]:
    """Return the contexts to store with a request's last event, keyed by Redis key.

    All completions share the request's prompt, which is stored only once.
    """
    completion = event.completion if isinstance(event, Finished) else None
    if completion is None or completion.context is None:
        return ()
    first = completion.context
    packed = {context_key(first.key): pack(KeptContext(fingerprint, first.identity, first.tokens))}
    for other in (choice.context for choice in completion.alternatives):
        if other is not None and context_key(other.key) not in packed:
            context = KeptContext(fingerprint, other.identity, other.tokens)
            packed[context_key(other.key)] = pack_after(context, first.key, len(other.prompt))
    return tuple(packed.items())


def replies_of(event: EngineEvent, job_id: str) -> list[tuple[dict[str, Any], str]]:
    """Return the messages of a chat's completions in the format of results, each with its context's key."""
    completion = event.completion if isinstance(event, Finished) else None
    return [
        (
            {
                "role": "assistant",
                "content": choice.text,
                "reasoning": choice.reasoning,
                "tool_calls": _tool_calls(choice, partial(_call_id, job_id, choice.index)),
            },
            choice.finish_key,
        )
        for choice in ((completion, *completion.alternatives) if completion is not None else ())
        if choice.finish_key is not None
    ]


def _choice(completion: Completion, sign: Sign, with_tokens: bool, call_id: Callable[[int], str]) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_sequence": completion.stop_sequence,
    }
    if with_tokens:
        choice["tokens"] = list(completion.tokens)
    if completion.reasoning is not None:
        choice["reasoning"], choice["signature"] = completion.reasoning, sign(completion.reasoning)
    if completion.tool_calls:
        choice["tool_calls"] = _tool_calls(completion, call_id)
    if completion.finish_key is not None:
        choice["finish_key"] = completion.finish_key
    if completion.logprobs is not None:
        choice["logprobs"] = _logprobs(completion.logprobs)
    return choice


def _warnings(completion: Completion) -> list[str]:
    """Return only the first few warnings, because a schema may have thousands of keywords that are not enforced."""
    first = [valid_text(warning[:MAX_WARNING_CHARS]) for warning in completion.warnings[:MAX_WARNINGS]]
    num_more = len(completion.warnings) - len(first)
    return [*first, f"and {num_more} more"] if num_more else first


def _call_id(job_id: str, index: int, number: int) -> str:
    """Return the id of a tool call.

    The id is known before the call is complete, and is the same in each attempt. `index` is the index of the completion
    in the events of the job.
    """
    return hashlib.sha256(f"{job_id} {index} {number}".encode()).hexdigest()[:CALL_ID_CHARS]


def _tool_calls(completion: Completion, call_id: Callable[[int], str]) -> list[ToolCall]:
    """Return the tool calls in OpenAI's format. `call_id` returns the id for the number of a call."""
    calls: list[ToolCall] = []
    for number, call in enumerate(completion.tool_calls):
        function: Function = {"name": valid_text(call.name), "arguments": valid_text(call.arguments)}
        calls.append({"id": call_id(number), "type": "function", "function": function})
        if call.is_partial:
            calls[-1]["partial"] = True
    return calls


def _logprobs(logprobs: Sequence[TokenLogprob]) -> list[Logprob]:
    return [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "top": list(entry.top),
            "text": entry.text,
            "top_texts": list(entry.top_texts),
        }
        for entry in logprobs
    ]


def line_event_of(event: EngineEvent, line: int, model_id: str, sign: Sign, job_id: str) -> Event | None:
    """Convert an engine's event for a line into an event of the chunk.

    Return None if the chunk has no corresponding event.
    """
    if isinstance(event, Started):
        return None
    if isinstance(event, Text):
        return event_of(replace(event, index=outputs_of_line(line)[event.index]), model_id, "", sign, job_id)
    if event.error is not None:
        return events.line(line, {"error": error_of(failure_of(event.error))})
    result = result_of_end(event, model_id, sign, job_id, outputs_of_line(line)[0])
    return None if result is None else events.line(line, {"result": result})


def error_of(failure: JobFailed | InvalidJob) -> Failure:
    """Return a failure in the format of a line's event."""
    return {"code": failure.code, "message": str(failure), "retryable": failure.retryable}


def resume_of(past: Past, n: int, line: int = 0) -> tuple[Resumed, ...]:
    """Return the tokens that an engine resumes from, or () if earlier attempts at the job or line generated none."""
    outputs = [past.outputs.get(index, Output()) for index in outputs_of_line(line)[:n]]
    if not any(output.tokens for output in outputs):
        return ()
    return tuple(
        Resumed(tuple(o.tokens), tuple(_logprob(entry) for entry in o.logprobs), o.mirostat_mu) for o in outputs
    )


def _logprob(entry: Logprob) -> TokenLogprob:
    top = tuple((int(t), float(p)) for t, p in entry["top"])
    texts = entry.get("text", ""), tuple(entry.get("top_texts", ()))  # journals of older versions have no texts
    return TokenLogprob(entry["token"], entry["logprob"], top, *texts)


def _usage(completion: Completion) -> Usage:
    usage: Any = {name: getattr(completion.usage, name) for name in USAGE}
    usage["cache_hit_kind"] = completion.usage.cache_hit_kind
    return cast(Usage, usage)


def _timings(completion: Completion) -> Timings:
    values: dict[str, float | None] = {name: getattr(completion.timings, name) for name in TIMINGS}
    rounded: Any = {name: None if value is None else round(value, 3) for name, value in values.items()}
    return cast(Timings, rounded)


def failure_of(error: EngineError) -> JobFailed:
    """Convert an engine's error into the failure of a job."""
    return JobFailed(error.code, str(error))


def error_event(failure: JobFailed) -> ErrorEvent:
    return events.error(failure.code, failure.message, failure.retryable)

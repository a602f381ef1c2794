"""Convert what the engine reports into the results and events of the contract. Used in workers only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, cast

from cellama import engine
from cellama.engine import Completion, EngineError, Event as EngineEvent, Finished, Resumed, Started, Text, TokenLogprob
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.contract.events import DoneDetails, ErrorEvent, Event, Failure, OutputDetails, TerminalEvent
from cellama.tasks.contract.json_values import valid_text
from cellama.tasks.contract.kinds.generate import GenerateResult
from cellama.tasks.contract.shapes.results import CompletionChoice, Function, Logprob, Timings, ToolCall, Usage
from cellama.tasks.state.contexts import KeptContext, pack, pack_after
from cellama.tasks.state.history import Output, Past, outputs_of_line

Sign = Callable[[str], str]  # the signature of reasoning
USAGE = tuple(field.name for field in fields(engine.Usage))
TIMINGS = tuple(field.name for field in fields(engine.Timings))
CALL_ID_CHARS = 9  # what Mistral's templates insist on
MAX_WARNINGS = 32  # of a result: more than a person reads
MAX_WARNING_CHARS = 300  # of each: names of properties may be long


def event_of(event: EngineEvent, model_id: str, worker: str, sign: Sign) -> Event:
    """Return the contract's event for an engine's event."""
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
        tell = events.token if event.kind == "text" else events.reasoning
        return tell(event.text, list(event.tokens), **details)
    return _terminal_event(event)


def _terminal_event(event: Finished) -> TerminalEvent:
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
        details["tool_calls"] = _tool_calls(completion)
    if completion.finish_key is not None:
        details["finish_key"] = completion.finish_key
    if completion.warnings:
        details["warnings"] = _warnings(completion)
    return events.done(completion.finish_reason, _usage(completion), **details)


def result_of(completion: Completion, model_id: str, sign: Sign) -> GenerateResult:
    """The result of a generation job: its first completion, and all of them as `choices` if there are several.

    What only chats have stands beside the text until `with_messages` puts it into the message.
    """
    with_tokens = completion.context_tokens is not None
    made: Any = {
        **_choice(completion, sign, with_tokens),
        "usage": _usage(completion),
        "timings": _timings(completion),
        "model": model_id,
        "seq_id": completion.slot,
        "seed": completion.seed,
        "mode": completion.mode,
        "cache_hit_kind": completion.usage.cache_hit_kind,
    }
    if completion.context_tokens is not None:
        made["context_tokens"] = list(completion.context_tokens)
    if completion.warnings:
        made["warnings"] = _warnings(completion)
    result = cast(GenerateResult, made)
    if completion.alternatives:
        result["choices"] = [
            cast(CompletionChoice, {"index": choice.index, **_choice(choice, sign, with_tokens)})
            for choice in (completion, *completion.alternatives)
        ]
    return result


def result_of_end(event: EngineEvent, model_id: str, sign: Sign) -> GenerateResult | None:
    """Return the result that comes with the end of a request that did not fail; None with any other event."""
    completion = event.completion if isinstance(event, Finished) else None
    if completion is None or completion.finish_reason == "cancelled":
        return None
    return result_of(completion, model_id, sign)


def contexts_of(event: EngineEvent, fingerprint: str) -> tuple[tuple[str, bytes], ...]:
    """Return the contexts of a request's completions by key, to be kept with its end. They share a prompt, which is
    kept once."""
    completion = event.completion if isinstance(event, Finished) else None
    if completion is None or completion.context is None:
        return ()
    first = completion.context
    kept = {first.key: pack(KeptContext(fingerprint, first.identity, first.tokens))}
    for other in (choice.context for choice in completion.alternatives):
        if other is not None and other.key not in kept:
            context = KeptContext(fingerprint, other.identity, other.tokens)
            kept[other.key] = pack_after(context, first.key, len(other.prompt))
    return tuple(kept.items())


def _choice(completion: Completion, sign: Sign, with_tokens: bool) -> dict[str, Any]:
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
        choice["tool_calls"] = _tool_calls(completion)
    if completion.finish_key is not None:
        choice["finish_key"] = completion.finish_key
    if completion.logprobs is not None:
        choice["logprobs"] = _logprobs(completion.logprobs)
    return choice


def _warnings(completion: Completion) -> list[str]:
    """Return the first warnings: a schema may have thousands of keywords that are not enforced."""
    shown = [valid_text(warning[:MAX_WARNING_CHARS]) for warning in completion.warnings[:MAX_WARNINGS]]
    more = len(completion.warnings) - len(shown)
    return [*shown, f"and {more} more"] if more else shown


def _tool_calls(completion: Completion) -> list[ToolCall]:
    """Return the calls in OpenAI's format. Their ids depend on the output alone, so event and result have the same."""
    calls: list[ToolCall] = []
    for place, call in enumerate(completion.tool_calls):
        name = hashlib.sha256(f"{completion.seed} {place} {completion.tokens}".encode()).hexdigest()[:CALL_ID_CHARS]
        function: Function = {"name": valid_text(call.name), "arguments": valid_text(call.arguments)}
        calls.append({"id": name, "type": "function", "function": function})
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


def line_event_of(event: EngineEvent, line: int, model_id: str, sign: Sign) -> Event | None:
    """Return the slice's event for an engine's event of one of its lines; None if there is none."""
    if isinstance(event, Started):
        return None
    if isinstance(event, Text):
        return event_of(replace(event, index=outputs_of_line(line)[event.index]), model_id, "", sign)
    if event.error is not None:
        return events.line(line, {"error": error_of(failure_of(event.error))})
    result = result_of_end(event, model_id, sign)
    return None if result is None else events.line(line, {"result": result})


def error_of(failure: JobFailed | InvalidJob) -> Failure:
    """Return the failure as the event of a line has it."""
    return {"code": failure.code, "message": str(failure), "retryable": failure.retryable}


def resume_of(past: Past, n: int, line: int = 0) -> tuple[Resumed, ...]:
    """Return what an engine needs to resume where earlier attempts of a job, or of a line, ended."""
    outputs = [past.outputs.get(index, Output()) for index in outputs_of_line(line)[:n]]
    if not any(output.tokens for output in outputs):
        return ()
    return tuple(
        Resumed(tuple(o.tokens), tuple(_logprob(entry) for entry in o.logprobs), o.mirostat_mu) for o in outputs
    )


def _logprob(entry: Logprob) -> TokenLogprob:
    top = tuple((int(t), float(p)) for t, p in entry["top"])
    texts = entry.get("text", ""), tuple(entry.get("top_texts", ()))  # a journal may be from before there were any
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
    """Return the job's failure for an engine's error."""
    return JobFailed(error.code, str(error))


def error_event(failure: JobFailed) -> ErrorEvent:
    return events.error(failure.code, failure.message, failure.retryable)

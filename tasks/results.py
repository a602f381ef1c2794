"""What the engine says, in the words of the contract: results and events. Used in workers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cellama.engine import Completion, EngineError, Finished, Resumed, Started, Text, TokenLogprob
from cellama.engine import Event as EngineEvent

from .contract import events
from .contract.errors import JobFailed
from .contract.events import Event
from .past import Output, Past

NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}


def event_of(event: EngineEvent, model_id: str, worker: str) -> Event:
    """The contract's event for an engine's."""
    if isinstance(event, Started):
        return events.started(model_id, event.num_prompt_tokens, worker, event.seed)
    if isinstance(event, Text):
        details: dict[str, Any] = {"index": event.index} if event.index else {}
        if event.logprobs:
            details["logprobs"] = _logprobs(event.logprobs)
        return events.token(event.text, list(event.tokens), **details)
    return _terminal_event(event)


def _terminal_event(event: Finished) -> Event:
    if event.error is not None:
        return error_event(failure_of(event.error))
    completion = event.completion
    assert completion is not None
    return events.done(
        completion.finish_reason,
        asdict(completion.usage),
        stop_sequence=completion.stop_sequence,
        timings=_timings(completion),
        seed=completion.seed,
    )


def result_of(completion: Completion, model_id: str) -> dict[str, Any]:
    """The result of a generation job: its first completion, and all of them as `choices` if there are several."""
    result = {
        **_choice(completion),
        "usage": asdict(completion.usage),
        "timings": _timings(completion),
        "model": model_id,
        "seq_id": completion.slot,
        "seed": completion.seed,
    }
    if completion.alternatives:
        result["choices"] = [
            {"index": choice.index, **_choice(choice)} for choice in (completion, *completion.alternatives)
        ]
    return result


def result_of_end(event: EngineEvent, model_id: str) -> dict[str, Any] | None:
    """The result that comes with an engine's event: with the end of a request that did not fail."""
    completion = event.completion if isinstance(event, Finished) else None
    if completion is None or completion.finish_reason == "cancelled":
        return None
    return result_of(completion, model_id)


def _choice(completion: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_sequence": completion.stop_sequence,
    }
    if completion.logprobs is not None:
        choice["logprobs"] = _logprobs(completion.logprobs)
    return choice


def _logprobs(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {"token": entry.token, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
        for entry in logprobs
    ]


def resume_of(past: Past, n: int) -> tuple[Resumed, ...]:
    """What an engine needs to go on where earlier attempts of a job ended."""
    if not past.num_tokens:
        return ()
    outputs = [past.outputs.get(index, Output()) for index in range(n)]
    return tuple(Resumed(tuple(o.tokens), tuple(_logprob(entry) for entry in o.logprobs)) for o in outputs)


def _logprob(entry: dict[str, Any]) -> TokenLogprob:
    return TokenLogprob(entry["token"], entry["logprob"], tuple((int(t), float(p)) for t, p in entry["top"]))


def _timings(completion: Completion) -> dict[str, float | None]:
    values: dict[str, float | None] = asdict(completion.timings)
    return {name: None if value is None else round(value, 3) for name, value in values.items()}


def failure_of(error: EngineError) -> JobFailed:
    """The job's failure for an engine's error."""
    return JobFailed(error.code, str(error), error.retryable)


def error_event(failure: JobFailed) -> Event:
    return events.error(failure.code, failure.message, failure.retryable)

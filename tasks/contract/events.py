"""The events of a job, as JSON objects (docs/architecture.md: Events of a job).

Code and type checkers distinguish events by the field `type`. The publisher numbers events: each event that a reader
receives has a `seq`, except for `ping`, which is not in the journal. To add an event type, add a TypedDict, a function
that creates the event, and a row in EVENT_CLASSES.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, cast

from typing_extensions import TypedDict, TypeIs

from .all_kinds import KINDS, Result
from .codes import meaning_of
from .kinds.generate import GenerateResult
from .shapes.results import FinishReason, Logprob, Mode, Timings, ToolCall, ToolCallDelta, Usage, usage_of

OUTPUT_TYPES = frozenset({"token", "reasoning", "reasoning_end"})  # events with the ids of sampled tokens

# The effect of an event in the ledger when the script `write` writes it.
# `start`: The job has a slot, so it runs and no longer waits.
# `progress`: The job runs, and its worker can compute it, so earlier crashes no longer count.
# `terminal`: The job has ended.
# `informative`: No effect. The event is journaled and published like any other.
EventClass = Literal["start", "progress", "terminal", "informative"]
EVENT_CLASSES: dict[str, EventClass] = {
    "started": "start",
    "token": "progress",
    "reasoning": "progress",
    "reasoning_end": "progress",
    "line": "progress",
    "done": "terminal",
    "error": "terminal",
}
TOO_LATE = "no worker started the job within its timeout; use a longer timeout, or start more workers"
TERMINAL_TYPES = frozenset(type for type, class_ in EVENT_CLASSES.items() if class_ == "terminal")


class _Numbered(TypedDict, total=False):
    seq: int


# Why a chat does not continue the latest context of its conversation. `options`, `tools`, `system`, `reply` and
# `message` were changed by the client. `no_room`: the context would leave too little room for the answer. `template`:
# the template can't render messages after the reply.
ReplayCause = Literal[
    "options", "tools", "system", "reply", "message", "expired", "unknown", "disabled", "no_room", "template"
]


class ReplayFields(TypedDict, total=False):
    """Describes how a chat continues earlier contexts of its conversation."""

    key: str  # finish_key of the context whose tokens replace the first messages
    messages: int  # number of these messages
    latest: str  # finish_key of the latest context of the conversation, if `cause` is set
    cause: ReplayCause  # why the prompt does not continue this context
    message: int  # index of the first message that differs from it


class ProvenanceFields(TypedDict, total=False):
    """The properties of the model that affect which tokens a job generates."""

    fingerprint: str  # SHA-256 of the model
    adapters: list[tuple[str, str, float]]  # name, SHA-256 and scale of each adapter
    sampling: dict[str, object]  # the model's defaults of sampling parameters
    llguidance: str  # version of llguidance, if the text is constrained
    replay: ReplayFields  # set if messages of the chat follow a reply


class StartedEvent(_Numbered, ProvenanceFields):
    """The job has received a slot. Only the first worker that assigns a slot to the job writes this event."""

    type: Literal["started"]
    model: str
    prompt_tokens: int
    worker: str
    seed: int


class OutputDetails(_Numbered, total=False):
    """Optional fields of output events."""

    index: int  # index of the completion; 0 if missing
    logprobs: list[Logprob]
    mirostat_mu: float


class TokenDetails(OutputDetails, total=False):
    """Optional fields of `token` events."""

    tool_call_deltas: list[ToolCallDelta]  # pieces of tool calls, which follow the text


class TokenEvent(TokenDetails):
    """A piece of the answer's text."""

    type: Literal["token"]
    text: str
    tokens: list[int]


class ReasoningEvent(OutputDetails):
    """A piece of the model's reasoning."""

    type: Literal["reasoning"]
    text: str
    tokens: list[int]


class ReasoningEndEvent(OutputDetails):
    """The model has finished reasoning."""

    type: Literal["reasoning_end"]
    signature: str
    tokens: list[int]


class Failure(TypedDict):
    """The error of a job or line (contract.codes)."""

    code: str
    message: str
    retryable: bool


class LineOutcome(_Numbered, total=False):
    """The outcome of a line, which has either `result` or `error`."""

    result: Result
    error: Failure


class LineEvent(LineOutcome):
    """A line of a bulk run has ended."""

    type: Literal["line"]
    line: int


class DoneDetails(_Numbered, total=False):
    """Optional fields of the `done` event, for jobs that an engine computed."""

    stop_sequence: str | None
    timings: Timings
    seed: int
    seq_id: int | None
    mode: Mode
    tool_calls: list[ToolCall]
    finish_key: str  # key of the prompt and output, for use as `parent_key`
    warnings: list[str]  # as in the result


class DoneEvent(DoneDetails):
    """The job has ended without an error."""

    type: Literal["done"]
    finish_reason: FinishReason
    usage: Usage


class ErrorEvent(_Numbered, Failure):
    """The job has failed."""

    type: Literal["error"]


class PingEvent(_Numbered):
    """No event arrived within the reader's ping interval."""

    type: Literal["ping"]


OutputEvent = TokenEvent | ReasoningEvent | ReasoningEndEvent
TerminalEvent = DoneEvent | ErrorEvent
Event = StartedEvent | OutputEvent | LineEvent | TerminalEvent | PingEvent


def started(model: str, prompt_tokens: int, worker: str, seed: int) -> StartedEvent:
    """Return the event for a job that has received a slot."""
    return {"type": "started", "model": model, "prompt_tokens": prompt_tokens, "worker": worker, "seed": seed}


def token(text: str, tokens: list[int], **details: Unpack[TokenDetails]) -> TokenEvent:
    """Return an event with the next piece of text and the ids of the tokens that were sampled since the last event."""
    return {"type": "token", "text": text, "tokens": tokens, **details}


def reasoning(text: str, tokens: list[int], **details: Unpack[OutputDetails]) -> ReasoningEvent:
    """Return an event with a piece of reasoning, which has the same fields as a `token` event."""
    return {"type": "reasoning", "text": text, "tokens": tokens, **details}


def reasoning_end(signature: str, tokens: list[int], **details: Unpack[OutputDetails]) -> ReasoningEndEvent:
    """Return the event that marks the end of a reasoning block.

    `signature` covers the text of the block, and is empty if the workers have no signing key.
    """
    return {"type": "reasoning_end", "signature": signature, "tokens": tokens, **details}


def line(index: int, outcome: LineOutcome) -> LineEvent:
    """Return the event for a finished line of a chunk."""
    return {"type": "line", "line": index, **outcome}


def done(finish_reason: FinishReason, usage: Usage, **details: Unpack[DoneDetails]) -> DoneEvent:
    """Return the last event of a job that has ended without an error. `usage` is the same as in the job's result."""
    return {"type": "done", "finish_reason": finish_reason, "usage": usage, **details}


def error(code: str, message: str, retryable: bool | None = None) -> ErrorEvent:
    """Return the last event of a job that has failed. By default, `retryable` is taken from the table of codes."""
    is_retryable = meaning_of(code).retryable if retryable is None else retryable
    return {"type": "error", "code": code, "message": message, "retryable": is_retryable}


def numbered(event: Event, seq: int) -> Event:
    """Add the seq to an event, and return the event as readers receive it."""
    with_seq: Any = {"seq": seq, **event}
    return cast(Event, with_seq)


def is_output(event: Event) -> TypeIs[OutputEvent]:
    """Return whether the event contains the ids of sampled tokens."""
    return event["type"] in OUTPUT_TYPES


def is_terminal(event: Event) -> TypeIs[TerminalEvent]:
    """Return whether this is the event that ends a stream."""
    return event["type"] in TERMINAL_TYPES


def ending_of_late(task: str, text: str = "", num_tokens: int = 0) -> tuple[TerminalEvent, Result | None]:
    """Return the last event and, if there is one, the result of a job that times out while no worker is running it.

    `text` and `num_tokens` describe the first completion's output from earlier attempts.
    """
    kind = KINDS.get(task)
    if kind is None or not kind.completes:
        return error("timeout", TOO_LATE), None
    usage = usage_of(completion_tokens=num_tokens)
    result: GenerateResult = {
        "text": text,
        "finish_reason": "timeout",
        "stop_sequence": None,
        "usage": usage,
        "timings": {},
    }
    return done("timeout", usage), kind.shape(result)

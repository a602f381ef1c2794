"""The events of a job, as JSON objects (docs/architecture.md: Events of a job).

`type` tells them apart, also for type checkers. The publisher numbers them: whatever a reader gets has a `seq`, except
for a `ping`, which is in no journal. A new type is a TypedDict, a function that makes it, and a row of EVENT_CLASSES.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, cast

from typing_extensions import TypedDict, TypeIs

from .all_kinds import Result
from .codes import meaning_of
from .shapes.results import FinishReason, Logprob, Mode, Timings, ToolCall, Usage

EVENT_FIELD = "event"  # the one field of a journal entry
OUTPUT_TYPES = frozenset({"token", "reasoning", "reasoning_end"})  # they carry the ids of sampled tokens

# What an event changes in the ledger when it is written (state/lua/write.lua):
# start: the job has a slot, so it runs and does not wait any more.
# progress: the same, and its worker can compute it, so earlier crashes don't count any more.
# terminal: the job has ended.
# informative: nothing. It is journaled and published like any other.
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
TERMINAL_TYPES = frozenset(type for type, class_ in EVENT_CLASSES.items() if class_ == "terminal")


class _Numbered(TypedDict, total=False):
    seq: int


class ProvenanceFields(TypedDict, total=False):
    """What a job's tokens depend on: SHA-256 of its model; name, SHA-256 and scale of each adapter; the `sampling`
    defaults of the model; the version of `llguidance`, if the text is constrained."""

    fingerprint: str
    adapters: list[tuple[str, str, float]]
    sampling: dict[str, object]
    llguidance: str


class StartedEvent(_Numbered, ProvenanceFields):
    """The first worker that gave the job a slot writes it, once."""

    type: Literal["started"]
    model: str
    prompt_tokens: int
    worker: str
    seed: int


class OutputDetails(_Numbered, total=False):
    """Optional fields of events of output."""

    index: int  # of the completion, unless 0
    logprobs: list[Logprob]
    mirostat_mu: float


class TokenEvent(OutputDetails):
    """Text of the answer."""

    type: Literal["token"]
    text: str
    tokens: list[int]


class ReasoningEvent(OutputDetails):
    """Text of the model's reasoning."""

    type: Literal["reasoning"]
    text: str
    tokens: list[int]


class ReasoningEndEvent(OutputDetails):
    """The reasoning has ended."""

    type: Literal["reasoning_end"]
    signature: str
    tokens: list[int]


class Failure(TypedDict):
    """Why a job, or a line, failed (contract.codes)."""

    code: str
    message: str
    retryable: bool


class LineOutcome(_Numbered, total=False):
    """The end of a line: one of the two."""

    result: Result
    error: Failure


class LineEvent(LineOutcome):
    """A line of a bulk run has ended."""

    type: Literal["line"]
    line: int


class DoneDetails(_Numbered, total=False):
    """Fields of the end of a job that an engine computed."""

    stop_sequence: str | None
    timings: Timings
    seed: int
    seq_id: int | None
    mode: Mode
    tool_calls: list[ToolCall]
    finish_key: str  # of what was read and generated; the `parent_key` of what follows
    warnings: list[str]  # as in the result


class DoneEvent(DoneDetails):
    """The job has ended without failing."""

    type: Literal["done"]
    finish_reason: FinishReason
    usage: Usage


class ErrorEvent(_Numbered, Failure):
    """The job has failed."""

    type: Literal["error"]


class PingEvent(_Numbered):
    """No event came for the time that the reader asked for."""

    type: Literal["ping"]


OutputEvent = TokenEvent | ReasoningEvent | ReasoningEndEvent
TerminalEvent = DoneEvent | ErrorEvent
Event = StartedEvent | OutputEvent | LineEvent | TerminalEvent | PingEvent


def started(model: str, prompt_tokens: int, worker: str, seed: int) -> StartedEvent:
    """The job has a slot."""
    return {"type": "started", "model": model, "prompt_tokens": prompt_tokens, "worker": worker, "seed": seed}


def token(text: str, tokens: list[int], **details: Unpack[OutputDetails]) -> TokenEvent:
    """Text that is final, and the token ids sampled since the last event."""
    return {"type": "token", "text": text, "tokens": tokens, **details}


def reasoning(text: str, tokens: list[int], **details: Unpack[OutputDetails]) -> ReasoningEvent:
    """Reasoning before the answer; fields as of `token`."""
    return {"type": "reasoning", "text": text, "tokens": tokens, **details}


def reasoning_end(signature: str, tokens: list[int], **details: Unpack[OutputDetails]) -> ReasoningEndEvent:
    """The block of reasoning is closed. `signature` is of its whole text; empty if the workers have no key."""
    return {"type": "reasoning_end", "signature": signature, "tokens": tokens, **details}


def line(place: int, outcome: LineOutcome) -> LineEvent:
    """A line of a chunk has ended: `result`, as of a job of its own, or `error` with code, message, retryable."""
    return {"type": "line", "line": place, **outcome}


def done(finish_reason: FinishReason, usage: Usage, **details: Unpack[DoneDetails]) -> DoneEvent:
    """The job ended without failing. `usage` as in its result."""
    return {"type": "done", "finish_reason": finish_reason, "usage": usage, **details}


def error(code: str, message: str, retryable: bool | None = None) -> ErrorEvent:
    """The job failed. `retryable` is as the table of codes has it, unless the caller knows better."""
    known = meaning_of(code).retryable if retryable is None else retryable
    return {"type": "error", "code": code, "message": message, "retryable": known}


def numbered(event: Event, seq: int) -> Event:
    """Return the event as readers receive it."""
    with_seq: Any = {"seq": seq, **event}
    return cast(Event, with_seq)


def is_output(event: Event) -> TypeIs[OutputEvent]:
    """Return whether the event has the ids of sampled tokens."""
    return event["type"] in OUTPUT_TYPES


def is_terminal(event: Event) -> TypeIs[TerminalEvent]:
    """Return whether this is the event that ends a stream."""
    return event["type"] in TERMINAL_TYPES

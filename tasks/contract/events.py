"""The events of a job, as JSON objects (docs/architecture.md: Events of a job)."""

from __future__ import annotations

from typing import Any

from .codes import meaning_of

Event = dict[str, Any]

EVENT_FIELD = "event"  # the one field of a journal entry
TERMINAL_TYPES = frozenset({"done", "error"})
OUTPUT_TYPES = frozenset({"token", "reasoning", "reasoning_end"})  # they carry the ids of sampled tokens
PROGRESS_TYPES = OUTPUT_TYPES | {"line"}


def started(model: str, prompt_tokens: int, worker: str, seed: int) -> Event:
    """The job has a slot."""
    return {"type": "started", "model": model, "prompt_tokens": prompt_tokens, "worker": worker, "seed": seed}


def token(text: str, tokens: list[int], **details: Any) -> Event:
    """Text that is final, and the token ids sampled since the last event."""
    return {"type": "token", "text": text, "tokens": tokens, **details}


def reasoning(text: str, tokens: list[int], **details: Any) -> Event:
    """What the model thinks before it answers, as `token` tells its answer."""
    return {"type": "reasoning", "text": text, "tokens": tokens, **details}


def reasoning_end(signature: str, tokens: list[int], **details: Any) -> Event:
    """The block of reasoning is closed. `signature` is of its whole text; empty if the workers have no key."""
    return {"type": "reasoning_end", "signature": signature, "tokens": tokens, **details}


def line(place: int, outcome: dict[str, Any]) -> Event:
    """A line of a chunk has ended: `result`, as of a job of its own, or `error` with code, message, retryable."""
    return {"type": "line", "line": place, **outcome}


def done(finish_reason: str, usage: dict[str, int], **details: Any) -> Event:
    """The job ended without failing. `usage` as in its result."""
    return {"type": "done", "finish_reason": finish_reason, "usage": usage, **details}


def error(code: str, message: str, retryable: bool | None = None) -> Event:
    """The job failed. `retryable` is as the table of codes has it, unless somebody knows better."""
    known = meaning_of(code).retryable if retryable is None else retryable
    return {"type": "error", "code": code, "message": message, "retryable": known}


def is_terminal(event: Event) -> bool:
    """True for the one event that ends a stream."""
    return event.get("type") in TERMINAL_TYPES

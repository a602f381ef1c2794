"""The kinds of jobs: one row per task. What differs by task is said here, and nowhere decided by a task's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import names
from .chunks import ChunkJob
from .events import TerminalEvent, done, error
from .payloads import (
    ApplyChatTemplateJob,
    ChatJob,
    DetokenizeJob,
    EmbedJob,
    GenerateJob,
    PrefillJob,
    RerankJob,
    TokenizeJob,
)
from .shapes.results import GenerateResult, Result, of_prefill, usage_of, with_messages

Payload = (
    GenerateJob
    | ChatJob
    | PrefillJob
    | EmbedJob
    | RerankJob
    | TokenizeJob
    | DetokenizeJob
    | ApplyChatTemplateJob
    | ChunkJob
)

TOO_LATE = "no worker came to the job within its timeout; raise it, or start more workers"


@dataclass(frozen=True, slots=True)
class Kind:
    """A task as its callers, its workers and the ledger need to know it."""

    task: str
    payload: type[Payload]
    positional: tuple[str, ...]  # the parameters that may be given by position
    completes: bool = False  # its result is a completion, so that an early end leaves a shorter one
    streams: bool = True  # may publish its output token by token
    keeps_journal: bool = False  # its results are events: they stay as long as results do
    shape: Callable[[Any], Result] = lambda result: result  # the result as callers get it, from the completion


KINDS: dict[str, Kind] = {
    kind.task: kind
    for kind in (
        Kind(names.TASK_GENERATE, GenerateJob, ("model", "prompt"), completes=True),
        Kind(names.TASK_CHAT, ChatJob, ("model", "messages"), completes=True, shape=with_messages),
        Kind(names.TASK_PREFILL, PrefillJob, ("model", "prompt"), shape=of_prefill),
        Kind(names.TASK_EMBED, EmbedJob, ("model", "texts")),
        Kind(names.TASK_RERANK, RerankJob, ("model", "query", "documents")),
        Kind(names.TASK_CHUNK, ChunkJob, ("model", "lines"), streams=False, keeps_journal=True),
        Kind(names.TASK_TOKENIZE, TokenizeJob, ("model", "text")),
        Kind(names.TASK_DETOKENIZE, DetokenizeJob, ("model", "tokens")),
        Kind(names.TASK_APPLY_CHAT_TEMPLATE, ApplyChatTemplateJob, ("model", "messages")),
    )
}


def ending_of_late(task: str, text: str = "", num_tokens: int = 0) -> tuple[TerminalEvent, Result | None]:
    """How a job ends whose `timeout` is over while no worker has it: its last event, and its result if there is one.

    `text` and `num_tokens` are what earlier attempts wrote of its first completion.
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

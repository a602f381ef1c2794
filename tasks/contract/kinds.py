"""The kinds of jobs: one row per task. What differs by task is said here, and nowhere decided by a task's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import names
from .chunks import ChunkJob
from .events import TerminalEvent, done, error
from .payloads import (
    ChatJob,
    DetokenizeJob,
    EmbedJob,
    GenerateJob,
    PrefillJob,
    RerankJob,
    TemplateJob,
    TokenizeJob,
)
from .shapes.results import (
    ChatResult,
    ChunkResult,
    DetokenizeResult,
    EmbedResult,
    GenerateResult,
    PrefillResult,
    RerankResult,
    Result,
    TemplateResult,
    TokenizeResult,
    of_prefill,
    usage_of,
    with_messages,
)

Payload = (
    GenerateJob | ChatJob | PrefillJob | EmbedJob | RerankJob | TokenizeJob | DetokenizeJob | TemplateJob | ChunkJob
)

TOO_LATE = "no worker came to the job within its timeout; raise it, or start more workers"


@dataclass(frozen=True, slots=True)
class Kind:
    """A task as its callers, its workers and the ledger need to know it."""

    task: str
    payload: type[Payload]
    positional: tuple[str, ...]  # the parameters that may be given by position
    result: type[Mapping[str, object]]  # the shape of what callers get
    is_public: bool = True  # False: only cellama itself queues it
    completes: bool = False  # its result is a completion, so that an early end leaves a shorter one
    streams: bool = True  # may publish its output token by token
    keeps_journal: bool = False  # its results are events: they stay as long as results do
    shape: Callable[[Any], Result] = lambda result: result  # the result as callers get it, from the completion


KINDS: dict[str, Kind] = {
    kind.task: kind
    for kind in (
        Kind(
            task=names.TASK_GENERATE,
            payload=GenerateJob,
            positional=("model", "prompt"),
            result=GenerateResult,
            completes=True,
        ),
        Kind(
            task=names.TASK_CHAT,
            payload=ChatJob,
            positional=("model", "messages"),
            result=ChatResult,
            completes=True,
            shape=with_messages,
        ),
        Kind(
            task=names.TASK_PREFILL,
            payload=PrefillJob,
            positional=("model", "prompt"),
            result=PrefillResult,
            shape=of_prefill,
        ),
        Kind(task=names.TASK_EMBED, payload=EmbedJob, positional=("model", "texts"), result=EmbedResult),
        Kind(
            task=names.TASK_RERANK, payload=RerankJob, positional=("model", "query", "documents"), result=RerankResult
        ),
        Kind(
            task=names.TASK_CHUNK,
            payload=ChunkJob,
            positional=("model", "lines"),
            result=ChunkResult,
            is_public=False,
            streams=False,
            keeps_journal=True,
        ),
        Kind(task=names.TASK_TOKENIZE, payload=TokenizeJob, positional=("model", "text"), result=TokenizeResult),
        Kind(
            task=names.TASK_DETOKENIZE, payload=DetokenizeJob, positional=("model", "tokens"), result=DetokenizeResult
        ),
        Kind(
            task=names.TASK_APPLY_CHAT_TEMPLATE,
            payload=TemplateJob,
            positional=("model", "messages"),
            result=TemplateResult,
        ),
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

"""The kind `prefill`, which computes the prefix of later jobs and stores it in the cache."""

from __future__ import annotations

from typing import Any, NotRequired, cast

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from ..payloads import ConversationJob, Messages, Prompt, ReadingJob
from ..shapes.results import CacheHitKind, FinishReason, Timings, Usage
from . import Kind

TASK_PREFILL = "cellama.prefill"


class PrefillJob(ConversationJob, ReadingJob):
    """A prompt, or a chat's messages or system message, prefilled into the cache as the prefix of later jobs."""

    prompt: Prompt | None = Field(default=None, description="Prompt to prefill, as a string or a list of token ids.")
    messages: Messages = Field(default=(), description="Messages of the chat to prefill, oldest first.")

    @model_validator(mode="after")
    def _check_one(self) -> PrefillJob:
        chat = sorted(self.model_dump(include=set(ConversationJob.__annotations__), exclude_defaults=True))
        if bool(chat) if self.prompt is not None else not {"messages", "system"} & set(chat):
            raise ValueError(f"pass either prompt, or messages or system; the call sets the chat parameters {chat}")
        return self


class PrefillResult(TypedDict):
    """Result of `prefill`."""

    finish_reason: FinishReason  # "stop", or "timeout" if the timeout passed before the prefill was complete
    finish_key: NotRequired[str]  # the `parent_key` for jobs that continue this prefix
    usage: Usage
    timings: Timings
    model: str
    seq_id: int | None  # the slot, if the job had one
    cache_hit_kind: CacheHitKind


def of_prefill(result: Any) -> PrefillResult:
    """Return the result of a prefill, without the fields for generated text."""
    shown: Any = {name: result[name] for name in PrefillResult.__annotations__ if name in result}
    return cast(PrefillResult, shown)


PREFILL = Kind(
    task=TASK_PREFILL,
    payload=PrefillJob,
    positional=("model", "prompt"),
    result=PrefillResult,
    shape=of_prefill,
    operation="prefill",
)

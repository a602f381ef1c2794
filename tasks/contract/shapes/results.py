"""The results of jobs, as JSON objects. What is NotRequired is there if it was asked for, or if the job got so far."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic, and so FastAPI, takes no other one before Python 3.12

FinishReason = Literal["stop", "length", "cancelled", "timeout"]
Mode = Literal["generate", "stream"]
CacheHitKind = Literal["exact", "partial", "cold"]
CacheTier = Literal["device", "ram", "disk"]


class Usage(TypedDict):
    """Token counts; `cached_tokens` of the prompt were not computed again.

    `cache_tier` and `cache_hit_kind` are there for what an engine of generation read.
    `accepted_prediction_tokens` of the completion were guessed rightly, so that they came faster;
    `rejected_prediction_tokens` were guessed and computed in vain.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_tier: NotRequired[CacheTier | None]  # where they were; None: nowhere
    cache_hit_kind: NotRequired[CacheHitKind]  # as in the result
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Timings(TypedDict, total=False):
    """Milliseconds from submission, and tokens per second; None where there was nothing to time.

    Until the worker's engine was given the request (`delivery_ms`), until it got a slot (`queue_ms`, in which
    `prefix_wait_ms` went by while others computed a prefix that it begins with), until its first token (`ttft_ms`).
    `prefix_cache_ratio` is the share of the prompt's tokens that were not computed again, 0 to 1.
    """

    queue_ms: float
    ttft_ms: float | None
    duration_ms: float
    prompt_eval_rate: float | None
    generation_rate: float | None
    delivery_ms: float
    prefix_wait_ms: float
    prefix_cache_ratio: float


class Logprob(TypedDict):
    """A sampled token. `top` are the best ones at its place: pairs of token id and logprob, with `top_texts`.

    The text of a token whose bytes are none by themselves is written so: `bytes:\\xe2\\x82`; control tokens have none.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    text: str
    top_texts: list[str]


class Function(TypedDict):
    """What a model calls; `arguments` are a JSON object as text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool in the OpenAI form."""

    id: str
    type: Literal["function"]
    function: Function
    partial: NotRequired[bool]  # true: the generation was cut within the arguments, which are not whole


class AssistantMessage(TypedDict):
    """The assistant's turn, as it can be sent back."""

    role: Literal["assistant"]
    content: str
    reasoning: NotRequired[str]
    signature: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class CompletionShape(TypedDict):
    text: str
    finish_reason: FinishReason
    stop_sequence: str | None
    tokens: NotRequired[list[int]]  # all that were generated
    logprobs: NotRequired[list[Logprob]]
    finish_key: NotRequired[str]  # of all that was read and generated (not with `cache_prompt` off): a `parent_key`


class CompletionChoice(CompletionShape):
    """One of several completions of a prompt."""

    index: int


class RunResult(CompletionShape):
    usage: Usage
    timings: Timings
    model: NotRequired[str]  # this and what follows are missing if no worker came to the job in time
    seq_id: NotRequired[int | None]  # the slot, if it had one
    mode: NotRequired[Mode]  # "stream" if its text was told piece by piece
    seed: NotRequired[int]
    cache_hit_kind: NotRequired[CacheHitKind]  # all of the prompt but its last token was in the cache, a part, nothing
    context_tokens: NotRequired[list[int]]  # of the prompt, then `tokens`
    warnings: NotRequired[list[str]]  # keywords of schemas that were not enforced, if there are any


def usage_of(*, prompt_tokens: int = 0, completion_tokens: int = 0) -> Usage:
    """Token counts of what had no engine, or none to its end."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }

"""What results of several kinds of jobs share, as JSON objects. A field that is NotRequired depends on the request."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic, and so FastAPI, takes no other one before Python 3.12

FinishReason = Literal["stop", "length", "cancelled", "timeout"]
Mode = Literal["generate", "stream"]
CacheHitKind = Literal["exact", "partial", "cold"]
CacheTier = Literal["device", "ram", "disk"]


class Usage(TypedDict):
    """Token counts; `cached_tokens` of the prompt were not computed again.

    Jobs that generate or prefill have `cache_tier` and `cache_hit_kind`. `accepted_prediction_tokens` of the completion
    were draft tokens, and so generated faster; `rejected_prediction_tokens` were computed in vain.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_tier: NotRequired[CacheTier | None]  # where they were; None: nowhere
    cache_hit_kind: NotRequired[CacheHitKind]  # as in the result
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Timings(TypedDict, total=False):
    """Milliseconds from submission, and tokens per second. A value is None if there was nothing to measure.

    `delivery_ms` ends when the worker's engine receives the request, `queue_ms` when the request gets a slot, and
    `ttft_ms` with the first token. `prefix_wait_ms` is the part of `queue_ms` in which another request computed a
    prefix that this one shares. `prefix_cache_ratio` is the share of the prompt in the cache, 0 to 1.
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
    """A sampled token. `top` has the best tokens at its position: pairs of token id and logprob, with `top_texts`.

    A token whose bytes are not text by themselves has the text `bytes:\\xe2\\x82`. Control tokens have no text.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    text: str
    top_texts: list[str]


class Function(TypedDict):
    """The function that a model calls. `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool in the OpenAI form."""

    id: str
    type: Literal["function"]
    function: Function
    partial: NotRequired[bool]  # true: the generation ended within the arguments


class AssistantMessage(TypedDict):
    """The assistant's turn, which can be sent back unchanged."""

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
    finish_key: NotRequired[str]  # of prompt and output, for use as `parent_key`; missing if `cache_prompt` is off


class CompletionChoice(CompletionShape):
    """One of several completions of a prompt."""

    index: int


class RunResult(CompletionShape):
    usage: Usage
    timings: Timings
    model: NotRequired[str]  # this and the following are missing if the timeout passed before a worker had the job
    seq_id: NotRequired[int | None]  # the slot, if it had one
    mode: NotRequired[Mode]  # "stream" if its text was published in pieces
    seed: NotRequired[int]
    cache_hit_kind: NotRequired[CacheHitKind]  # exact: all of the prompt except its last token was in the cache
    context_tokens: NotRequired[list[int]]  # those of the prompt, then `tokens`
    warnings: NotRequired[list[str]]  # keywords of schemas that were not enforced


def usage_of(*, prompt_tokens: int = 0, completion_tokens: int = 0) -> Usage:
    """Return token counts of a job without an engine, or one that ended before an engine had counted them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }

"""Parts that the results of several kinds of jobs share, as JSON objects.

The request determines whether a result contains a NotRequired field.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic, and thus FastAPI, requires this one before Python 3.12

FinishReason = Literal["stop", "length", "cancelled", "timeout"]
Mode = Literal["generate", "stream"]
CacheHitKind = Literal["exact", "partial", "cold"]
CacheTier = Literal["device", "ram", "disk"]


class Usage(TypedDict):
    """Token counts. `cached_tokens` is the number of prompt tokens that were taken from the cache.

    Only jobs that generate or prefill have `cache_tier` and `cache_hit_kind`. `accepted_prediction_tokens` is the
    number of draft tokens in the completion, which were generated faster. `rejected_prediction_tokens` is the number of
    draft tokens that were not used.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_tier: NotRequired[CacheTier | None]  # tier of the cached tokens; None if there were none
    cache_hit_kind: NotRequired[CacheHitKind]  # as in the result
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Timings(TypedDict, total=False):
    """Milliseconds since submission, and rates in tokens per second. Values that were not measured are None.

    `delivery_ms` ends when the worker's engine receives the request, `queue_ms` when the request gets a slot, and
    `ttft_ms` with the first token. `prefix_wait_ms` is the part of `queue_ms` during which another request computed a
    shared prefix. `prefix_cache_ratio` is the cached part of the prompt, from 0 to 1.
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
    """A sampled token.

    `top` contains the most likely tokens at this position, as pairs of a token id and a logprob. `top_texts` contains
    their texts. The text of a token with incomplete characters looks like `bytes:\\xe2\\x82`. The text of control
    tokens is empty.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    text: str
    top_texts: list[str]


class Function(TypedDict):
    """The function that a model calls. `arguments` is a JSON object, encoded as a string."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call in the OpenAI format."""

    id: str
    type: Literal["function"]
    function: Function
    partial: NotRequired[bool]  # true if the generation ended within the arguments


class ToolCallDelta(TypedDict):
    """The next piece of a tool call that the model is writing. The first piece of a call has `id` and `name`.

    The concatenated `arguments` of a call's pieces are the arguments of the finished call.
    """

    index: int  # number of the call in the reply
    id: NotRequired[str]
    name: NotRequired[str]
    arguments: str


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
    tokens: NotRequired[list[int]]  # all generated tokens
    logprobs: NotRequired[list[Logprob]]
    finish_key: NotRequired[str]  # key of the prompt and output for `parent_key`; missing if `cache_prompt` is false


class CompletionChoice(CompletionShape):
    """One of several completions of a prompt."""

    index: int


class RunResult(CompletionShape):
    usage: Usage
    timings: Timings
    model: NotRequired[str]  # this and the next fields are missing if the timeout passed before a worker ran the job
    seq_id: NotRequired[int | None]  # the slot, if the job had one
    mode: NotRequired[Mode]  # "stream" if the text was published token by token
    seed: NotRequired[int]
    cache_hit_kind: NotRequired[CacheHitKind]  # exact: all of the prompt except its last token was in the cache
    context_tokens: NotRequired[list[int]]  # the tokens of the prompt, followed by `tokens`
    warnings: NotRequired[list[str]]  # keywords of schemas that were not enforced


def usage_of(*, prompt_tokens: int = 0, completion_tokens: int = 0) -> Usage:
    """Return the usage of a job that doesn't need an engine, or that ended before an engine counted its tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }

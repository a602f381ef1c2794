"""Request events, which the engine emits once per step, and statistics about steps and requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cellama.engine.kvstore.keys import key_of, seed_of
from cellama.engine.text.formats.calls import CallDelta, ParsedToolCall
from cellama.engine.text.reply_reader import Kind

from .errors import EngineError
from .request import Mode, TokenLogprob

FinishReason = Literal["stop", "length", "cancelled", "timeout"]
# How much of a prompt was reused: everything except the last token, which is always computed, or a part, or nothing.
CacheHitKind = Literal["exact", "partial", "cold"]
CacheTier = Literal["device", "ram", "disk"]  # place of reused cells: in a slot, or in a saved state


class PrefixHit(NamedTuple):
    """The number of reused prompt tokens, the kind of hit, and the tier in which the reused tokens were stored."""

    kind: CacheHitKind
    num_tokens: int
    tier: CacheTier | None  # None if nothing was reused


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """The token counts of a request.

    `cached_tokens` is the number of prompt tokens that were reused instead of being computed.
    """

    prompt_tokens: int  # number of prompt tokens
    completion_tokens: int  # number of generated tokens
    cached_tokens: int = 0  # prompt tokens that were in a cache
    cache_tier: CacheTier | None = None  # place of the cached tokens; None if there are none
    accepted_prediction_tokens: int = 0  # tokens of the completion that were accepted draft tokens
    rejected_prediction_tokens: int = 0  # draft tokens that were computed but not accepted

    @property
    def cache_hit_kind(self) -> CacheHitKind:
        """Whether all, part or none of the prompt was reused."""
        if not self.cached_tokens:
            return "cold"
        return "exact" if self.cached_tokens >= self.prompt_tokens - 1 else "partial"

    @property
    def cache_hit(self) -> PrefixHit:
        """The number of reused prompt tokens, the kind of hit, and the tier in which the reused tokens were stored."""
        return PrefixHit(self.cache_hit_kind, self.cached_tokens, self.cache_tier)


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """A request's durations in milliseconds since submission, and its rates in tokens per second.

    Values that can't be measured are None.
    """

    queue_ms: float  # until the request got a slot, or ended without one
    ttft_ms: float | None  # until the first token
    duration_ms: float  # until the end of the request
    prompt_eval_rate: float | None  # prompt tokens per second
    generation_rate: float | None  # generated tokens per second
    delivery_ms: float = 0.0  # part of queue_ms: until the engine received the request from the queue
    prefix_wait_ms: float = 0.0  # part of queue_ms: while another request computed a prefix that both share
    prefix_cache_ratio: float = 0.0  # share of the prompt that was in a cache, 0 to 1


class Context:
    """The tokens of a prompt and its output, and the conditions for continuing from these tokens.

    This class is thread-safe.
    """

    __slots__ = ("_key", "adapters", "generated", "identity", "prompt", "scope")

    def __init__(
        self,
        identity: bytes,
        adapters: tuple[tuple[str, float], ...],
        scope: str,
        prompt: tuple[int, ...],
        generated: tuple[int, ...] = (),
    ) -> None:
        """Create a context.

        This method runs on the engine thread, so it must be fast. `adapters` contains fingerprints and scales.
        """
        self.identity = identity
        self.adapters = adapters
        self.scope = scope
        self.prompt = prompt
        self.generated = generated
        self._key: str | None = None

    @property
    def seed(self) -> bytes:
        """A digest of everything that determines the cells of these tokens, except the tokens themselves."""
        return seed_of(self.identity, self.adapters, self.scope)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the prompt, followed by the tokens of the output."""
        return self.prompt + self.generated

    @property
    def key(self) -> str:
        """The context's key, a string of 64 hexadecimal digits."""
        if self._key is None:
            self._key = key_of(self.seed, self.tokens)
        return self._key

    def __len__(self) -> int:
        return len(self.prompt) + len(self.generated)


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a successful request. `text` contains neither stop strings nor incomplete characters.

    `tokens` and `usage` include all generated tokens. In a chat, `text` excludes reasoning and tool calls.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_sequence: str | None
    usage: RequestUsage
    timings: RequestTimings
    slot: int | None  # the last slot; None if it never had one
    seed: int
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if requested
    reasoning: str | None = None  # reasoning of the model, if any
    tool_calls: tuple[ParsedToolCall, ...] = ()
    mode: Mode = "generate"  # how the caller gets the text
    context_tokens: tuple[int, ...] | None = None  # prompt and `tokens`, if requested; None for alternatives
    alternatives: tuple[Completion, ...] = ()  # the other completions by index if n > 1; `usage` then counts all
    context: Context | None = field(default=None, repr=False, compare=False)  # None if cache_prompt is False
    warnings: tuple[str, ...] = ()  # requested features that were not enforced

    @property
    def finish_key(self) -> str | None:
        """The key of the context that consists of the prompt and the output.

        To continue the context, a later request passes this key as `parent_key`. The key is computed by the first
        thread that reads it. If `cache_prompt` is False, the key is None.
        """
        return None if self.context is None else self.context.key


@dataclass(frozen=True, slots=True)
class Started:
    """Reports that a request has received a slot."""

    request_id: str
    slot: int
    num_prompt_tokens: int
    num_cached_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is final, and the ids of the tokens sampled since the last event.

    Some of these tokens may belong to text that is still held back. The event at the end of the reasoning contains the
    complete reasoning as its text.
    """

    request_id: str
    text: str
    tokens: tuple[int, ...]
    index: int = 0  # number of the completion
    logprobs: tuple[TokenLogprob, ...] = ()  # log-probabilities of these tokens, if requested
    kind: Kind = "text"
    mirostat_mu: float | None = None  # state of mirostat after the last of these tokens
    calls: tuple[CallDelta, ...] = ()  # pieces of tool calls, which follow the text


@dataclass(frozen=True, slots=True)
class Finished:
    """The only terminal event of a request. The event contains either a completion or an error."""

    request_id: str
    completion: Completion | None = None
    error: EngineError | None = None


Event = Started | Text | Finished


@dataclass(frozen=True, slots=True)
class StepStats:
    """Measurements of one step and its batch."""

    model: str  # id of the model
    at: float  # end of the step, in Unix seconds
    batch_size: int  # number of tokens in the batch
    decode_tokens: int  # including draft tokens
    prefill_tokens: int  # prompt tokens in the batch
    active_slots: int  # slots that prefill or decode, including slots without tokens in this batch
    queue_depth: int  # requests waiting for a slot
    eval_ms: float  # time inside llama.cpp's decode
    step_ms: float  # time of the whole step, including sampling
    wait_ms: float  # part of step_ms in which the engine thread waited for the GIL, a core or a device
    worker: str | None = None  # the Celery worker that computed it; None in a library

    @property
    def python_ms(self) -> float:
        """The time spent outside llama.cpp's decode call, including sampling."""
        return self.step_ms - self.eval_ms


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Measurements of a finished request.

    Durations are measured from submission. Values that don't apply to the request are None.
    """

    model: str  # id of the model
    at: float  # end of the request, in Unix seconds
    request_id: str  # in a worker, the id of the job's attempt
    mode: Mode  # "stream", or "generate" if its text was not published in pieces
    seq_id: int | None  # slot of the request, if it had one
    finish_reason: str  # finish reason of the completion, or "error"
    prompt_tokens: int  # prompt tokens
    generated_tokens: int  # generated tokens
    duration_ms: float  # time to the end
    ttft_ms: float | None  # time to the first token
    prompt_eval_rate: float | None  # tokens per second
    generation_rate: float | None  # tokens per second
    prefix_cache_tokens: int  # prompt tokens that were in a cache
    prefix_cache_ratio: float  # share of the prompt that was in a cache, 0 to 1
    worker: str | None = None  # the Celery worker that ran it; None in a library

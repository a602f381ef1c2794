"""What the engine tells: events of requests, once per step, and telemetry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cellama.engine.text.reply_parser import Kind
from cellama.engine.text.tool_calls import ToolCall

from .errors import EngineError
from .logprobs import TokenLogprob

FinishReason = Literal["stop", "length", "cancelled", "timeout"]
Phase = Literal["idle", "prefilling", "generating", "stopped"]  # stopped: its thread died, it takes nothing


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds from submission, and tokens per second; None where there was nothing to time."""

    queue_ms: float  # until the request got a slot, or ended without one
    ttft_ms: float | None  # until its first token
    duration_ms: float
    prompt_eval_rate: float | None
    generation_rate: float | None
    delivery_ms: float = 0.0  # part of queue_ms: until the engine was given it, a job's way through queue and worker
    prefix_wait_ms: float = 0.0  # part of queue_ms: while others computed a prefix that it could take over


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of an accepted request that did not fail. `text` has no stop string and no broken character.

    `tokens` and `usage` are of all that was generated; of a chat, `text` is without reasoning and tool calls.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stop_sequence: str | None
    usage: Usage
    timings: Timings
    slot: int | None  # the last one; None: it never got one
    seed: int
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token, if asked for
    reasoning: str | None = None  # what the model thought, if it did
    tool_calls: tuple[ToolCall, ...] = ()
    alternatives: tuple[Completion, ...] = ()  # with n > 1: the others, by index; `usage` counts all then


@dataclass(frozen=True, slots=True)
class Started:
    """The request has a slot."""

    request_id: str
    slot: int
    num_prompt_tokens: int
    num_cached_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is final, and the ids sampled since the last event (some may still hold text back).

    The end of a block of reasoning has all of the reasoning as its text.
    """

    request_id: str
    text: str
    tokens: tuple[int, ...]
    index: int = 0  # which of the n completions
    logprobs: tuple[TokenLogprob, ...] = ()  # of these tokens, if asked for
    kind: Kind = "text"
    mirostat_mu: float | None = None  # what mirostat has learned by the last of these tokens


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of a request: either a completion or an error."""

    request_id: str
    completion: Completion | None = None
    error: EngineError | None = None


Event = Started | Text | Finished


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step: what its batch held and how long it took."""

    batch_size: int  # tokens
    decode_tokens: int
    prefill_tokens: int
    active_slots: int
    queue_depth: int
    eval_ms: float  # inside llama.cpp's decode
    step_ms: float  # the whole step, sampling included
    wait_ms: float  # of these the engine thread did not run: it waited for the GIL, a core, or a device

    @property
    def python_ms(self) -> float:
        """Everything outside llama.cpp's decode, sampling included."""
        return self.step_ms - self.eval_ms


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One finished request, in numbers only."""

    request_id: str
    mode: Literal["generate", "stream"]
    seq_id: int | None
    finish_reason: str  # of the completion, or "error"
    prompt_tokens: int
    generated_tokens: int
    duration_ms: float
    ttft_ms: float | None
    prompt_eval_rate: float | None
    generation_rate: float | None
    prefix_cache_tokens: int
    prefix_cache_ratio: float


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The state of an engine a moment ago (20 ms when it works, exact when it is idle); reading it never waits."""

    phase: Phase
    slots_total: int
    slots_prefilling: int
    slots_decoding: int
    queue_depth: int
    kv_used_tokens: int  # held by running sequences
    kv_cached_tokens: int  # held by idle slots for whoever begins alike
    kv_total_tokens: int
    ram_states: int  # saved in RAM
    ram_used_bytes: int
    preemptions: int
    cache_hits: int  # admissions that took over a prefix
    cache_misses: int
    steps: int
    mixed_steps: int  # steps whose batch held decode and prefill tokens
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    requests_finished: int
    requests_failed: int
    generation_rate: float  # tokens per second, over the last second of work
    mean_slot_s: float  # how long recent requests were in a slot, on average; 0 before the first

    @property
    def slots_busy(self) -> int:
        """Slots that read a prompt or decode."""
        return self.slots_prefilling + self.slots_decoding

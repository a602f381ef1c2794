"""What the engine tells: events of requests, once per step; telemetry of steps and requests; snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cellama.engine.text.reply_parser import Kind
from cellama.engine.text.tool_calls import ToolCall

from .errors import EngineError
from .logprobs import TokenLogprob
from .request import Mode

FinishReason = Literal["stop", "length", "cancelled", "timeout"]
# What was taken over of a prompt: all but its last token, which has to be computed; a part; nothing.
CacheHitKind = Literal["exact", "partial", "cold"]
Phase = Literal["idle", "prefilling", "generating", "stopped"]  # stopped: its thread died, it takes nothing


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def cache_hit_kind(self) -> CacheHitKind:
        """How much of the prompt was taken over."""
        if not self.cached_tokens:
            return "cold"
        return "exact" if self.cached_tokens >= self.prompt_tokens - 1 else "partial"


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
    prefix_cache_ratio: float = 0.0  # of the prompt's tokens, those that were not computed again: 0 to 1


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
    mode: Mode = "generate"  # how its caller gets the text
    context_tokens: tuple[int, ...] | None = None  # of the prompt and `tokens`, if asked for; not of alternatives
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

    model: str
    at: float  # its end, in unix seconds
    batch_size: int  # tokens
    decode_tokens: int
    prefill_tokens: int
    active_slots: int  # that read a prompt or decode, whether this batch has tokens of them or not
    queue_depth: int  # requests waiting for a slot
    eval_ms: float  # inside llama.cpp's decode
    step_ms: float  # the whole step, sampling included
    wait_ms: float  # of these the engine thread did not run: it waited for the GIL, a core, or a device
    worker: str | None = None  # the Celery worker that computed it; None in a library

    @property
    def python_ms(self) -> float:
        """Everything outside llama.cpp's decode, sampling included."""
        return self.step_ms - self.eval_ms


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request that ended, in numbers only. Times count from its submission; None: it did not come so far."""

    model: str
    at: float  # its end, in unix seconds
    request_id: str  # of a job's attempt, in a worker
    mode: Mode
    seq_id: int | None  # the slot, if it had one
    finish_reason: str  # of the completion, or "error"
    prompt_tokens: int
    generated_tokens: int
    duration_ms: float
    ttft_ms: float | None
    prompt_eval_rate: float | None  # tokens per second
    generation_rate: float | None  # tokens per second
    prefix_cache_tokens: int  # of the prompt, that were not computed again
    prefix_cache_ratio: float  # of the prompt: 0 to 1
    worker: str | None = None  # the Celery worker that had it; None in a library


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The state of an engine at the moment of asking, also during a step; reading it never waits.

    Counts are since the engine was made.
    """

    phase: Phase
    slots_total: int
    slots_prefilling: int
    slots_decoding: int
    requests_running: int  # admitted: they have a slot
    requests_waiting: int  # submitted, and no slot yet
    kv_used_tokens: int  # held by running sequences
    kv_cached_tokens: int  # held by idle slots for whoever begins alike
    kv_total_tokens: int
    ram_states: int  # saved in RAM
    ram_used_bytes: int
    ram_saves: int
    ram_evictions: int  # states dropped for the quota
    preemptions: int
    cache_hits: int  # admissions that took over a prefix, of which …
    cache_hits_slot: int  # … in the slot where it was
    cache_hits_copy: int  # … from another slot
    cache_hits_ram: int  # … from RAM
    cache_misses: int
    steps: int
    mixed_steps: int  # steps whose batch held decode and prefill tokens
    prompt_tokens: int  # of requests that finished
    cached_tokens: int  # of these, that were not computed again
    generated_tokens: int
    requests_finished: int
    requests_failed: int
    prompt_rate: float  # prompt tokens computed per second, over the last second of work
    generation_rate: float  # tokens per second, over the last second of work
    mean_slot_s: float  # how long recent requests were in a slot, on average; 0 before the first

    @property
    def slots_busy(self) -> int:
        """Slots that read a prompt or decode."""
        return self.slots_prefilling + self.slots_decoding


@dataclass(frozen=True, slots=True)
class EmbedderSnapshot:
    """The state of an embedder or a reranker at the moment of asking, also during a step; reading it never waits.

    Counts are since it was made.
    """

    phase: Phase  # never "generating"
    requests_running: int  # of which a text is computed, or was
    requests_waiting: int  # of which none was
    texts_waiting: int  # of all requests
    steps: int
    texts: int  # that were computed
    prompt_tokens: int  # of these
    requests_finished: int
    requests_failed: int
    prompt_rate: float  # tokens per second, over the last second of work


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """What a model has of the three, each as it is at the moment of asking."""

    engine: EngineSnapshot | None
    embedder: EmbedderSnapshot | None
    reranker: EmbedderSnapshot | None

    @property
    def parts(self) -> list[EngineSnapshot | EmbedderSnapshot]:
        """Those that it has."""
        return [part for part in (self.engine, self.embedder, self.reranker) if part is not None]

    @property
    def phase(self) -> Phase:
        """Of the busiest; "stopped" if one of them is."""
        return busiest([part.phase for part in self.parts])

    @property
    def requests_running(self) -> int:
        """Of all of them."""
        return sum(part.requests_running for part in self.parts)

    @property
    def requests_waiting(self) -> int:
        """Of all of them."""
        return sum(part.requests_waiting for part in self.parts)


@dataclass(frozen=True, slots=True)
class ManagerSnapshot:
    """All models of a process together, those of other capabilities than generation, too: sums over what is loaded."""

    phase: Phase  # of the busiest; "stopped" if a thread of one died
    models: int  # that are loaded
    slots_total: int
    slots_busy: int
    requests_running: int
    requests_waiting: int
    requests_finished: int
    requests_failed: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prompt_rate: float
    generation_rate: float
    kv_used_tokens: int
    kv_cached_tokens: int
    kv_total_tokens: int
    ram_states: int
    ram_used_bytes: int
    ram_saves: int
    ram_evictions: int
    preemptions: int
    cache_hits: int
    cache_hits_slot: int
    cache_hits_copy: int
    cache_hits_ram: int
    cache_misses: int


def busiest(phases: Sequence[Phase]) -> Phase:
    """The phase of several together; "stopped" if one of them is."""
    order: tuple[Phase, ...] = ("stopped", "generating", "prefilling")
    return next((phase for phase in order if phase in phases), "idle")

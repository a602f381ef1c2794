"""Snapshots: the current state of engines, embedders, and all models in a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

Phase = Literal["idle", "prefilling", "generating", "stopped"]  # stopped: its thread has failed


@dataclass(frozen=True, slots=True)
class SourceDrafts:
    """Statistics about the draft tokens proposed by one source."""

    drafted: int  # draft tokens that were checked
    accepted: int  # draft tokens that were accepted
    drafts: int  # number of drafts, each of one or more tokens


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The current state of an engine. Reading a snapshot never blocks, not even during a step.

    All counts start when the engine is created.
    """

    phase: Phase  # current activity
    slots_total: int  # number of slots
    slots_prefilling: int  # slots that prefill
    slots_decoding: int  # slots that decode
    requests_running: int  # requests that have a slot
    requests_waiting: int  # requests without a slot
    kv_used_tokens: int  # KV cells of running sequences
    kv_cached_tokens: int  # KV cells that idle slots keep for later requests with the same prefix
    kv_total_tokens: int  # number of KV cells
    ram_states: int  # KV states in RAM
    ram_used_bytes: int  # their size
    ram_saves: int  # KV states saved in RAM
    ram_evictions: int  # KV states removed from RAM because of the quota
    disk_loads: int  # KV states read from disk
    disk_late: int  # KV states read from disk after they had been computed already
    disk_misses: int  # files that were damaged, missing, or written for another model or version
    disk_saves: int  # KV states written to disk
    disk_drops: int  # KV states not written: already on disk, less useful than others, or refused by the disk
    disk_evictions: int  # files that this process removed because of the quota
    disk_read_bytes: int  # bytes read from disk
    disk_written_bytes: int  # bytes written to disk
    disk_used_bytes: int  # size of cache_dir a few seconds ago, including other models and processes
    disk_quota_bytes: int  # quota of cache_dir
    preemptions: int  # sequences that lost their slot to a more urgent one
    strategy_failures: int  # steps in which the batch strategy failed and another one replaced it
    cache_hits: int  # requests that got a slot and reused a prefix
    cache_hits_slot: int  # hits in the same slot
    cache_hits_copy: int  # hits copied from another slot
    cache_hits_ram: int  # hits from RAM
    cache_hits_disk: int  # hits from disk
    cache_misses: int  # requests that reused no prefix
    steps: int  # number of steps
    mixed_steps: int  # steps with both decode and prefill tokens
    prompt_tokens: int  # prompt tokens of finished requests
    cached_tokens: int  # prompt tokens of finished requests that were in a cache
    generated_tokens: int  # generated tokens
    drafts: Mapping[str, SourceDrafts]  # draft tokens by source
    requests_finished: int  # requests that finished without an error
    requests_failed: int  # requests that failed
    prompt_rate: float  # prompt tokens computed per second, over the last second of work
    generation_rate: float  # tokens per second, over the last second of work
    mean_slot_s: float  # mean time of recent requests in a slot, in seconds; 0 before the first one

    @property
    def slots_busy(self) -> int:
        """The number of slots that are prefilling or decoding."""
        return self.slots_prefilling + self.slots_decoding


@dataclass(frozen=True, slots=True)
class EmbedderSnapshot:
    """The current state of an embedder or reranker. Reading a snapshot never blocks, not even during a step.

    All counts start when the embedder or reranker is created.
    """

    phase: Phase  # never "generating"
    requests_running: int  # requests with a text that has been started
    requests_waiting: int  # requests without a text that has been started
    texts_waiting: int  # texts of all requests that are waiting
    steps: int  # number of steps
    texts: int  # computed texts
    prompt_tokens: int  # tokens of these texts
    requests_finished: int  # requests that finished without an error
    requests_failed: int  # requests that failed
    prompt_rate: float  # tokens per second, over the last second of work


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """The current states of a model's engine, embedder and reranker. Parts that the model doesn't have are None."""

    engine: EngineSnapshot | None
    embedder: EmbedderSnapshot | None
    reranker: EmbedderSnapshot | None

    @property
    def parts(self) -> list[EngineSnapshot | EmbedderSnapshot]:
        """Return the states of the parts that the model has."""
        return [part for part in (self.engine, self.embedder, self.reranker) if part is not None]

    @property
    def phase(self) -> Phase:
        """Return the phase of the busiest part, or "stopped" if any part has stopped."""
        return busiest([part.phase for part in self.parts])

    @property
    def requests_running(self) -> int:
        """Return the total number of running requests in all parts."""
        return sum(part.requests_running for part in self.parts)

    @property
    def requests_waiting(self) -> int:
        """Return the total number of waiting requests in all parts."""
        return sum(part.requests_waiting for part in self.parts)


@dataclass(frozen=True, slots=True)
class ManagerSnapshot:
    """Totals for all models loaded in a process, including embedders and rerankers."""

    phase: Phase  # phase of the busiest model; "stopped" if a thread of any model has died
    models: int  # number of loaded models
    slots_total: int  # number of slots
    slots_busy: int  # slots that prefill or decode
    requests_running: int  # requests that have a slot
    requests_waiting: int  # requests without a slot
    requests_finished: int  # requests that finished without an error
    requests_failed: int  # requests that failed
    prompt_tokens: int  # prompt tokens of finished requests
    cached_tokens: int  # prompt tokens that were in a cache
    generated_tokens: int  # generated tokens
    prompt_rate: float  # prompt tokens per second, over the last second of work
    generation_rate: float  # generated tokens per second, over the last second of work
    kv_used_tokens: int  # KV cells of running sequences
    kv_cached_tokens: int  # KV cells that idle slots keep
    kv_total_tokens: int  # number of KV cells
    ram_states: int  # KV states in RAM
    ram_used_bytes: int  # their size
    ram_saves: int  # KV states saved in RAM
    ram_evictions: int  # KV states removed from RAM because of the quota
    disk_loads: int  # KV states read from disk
    disk_late: int  # KV states read from disk after they had been computed already
    disk_misses: int  # unusable or missing files
    disk_saves: int  # KV states written to disk
    disk_drops: int  # KV states not written to disk
    disk_evictions: int  # files removed because of the quota
    disk_read_bytes: int  # bytes read from disk
    disk_written_bytes: int  # bytes written to disk
    preemptions: int  # sequences that lost their slot to a more urgent one
    cache_hits: int  # requests that reused a prefix
    cache_hits_slot: int  # hits in the same slot
    cache_hits_copy: int  # hits copied from another slot
    cache_hits_ram: int  # hits from RAM
    cache_hits_disk: int  # hits from disk
    cache_misses: int  # requests that reused no prefix

    @classmethod
    def sum_of(cls, models: Sequence[ModelSnapshot]) -> ManagerSnapshot:
        """Return the totals for all parts of these models.

        A figure that a part doesn't report counts as 0.
        """
        parts = [part for model in models for part in model.parts]
        names = [field.name for field in fields(cls) if field.name not in ("phase", "models")]
        sums: dict[str, Any] = {name: sum(getattr(part, name, 0) for part in parts) for name in names}
        return cls(phase=busiest([part.phase for part in parts]), models=len(models), **sums)


def busiest(phases: Sequence[Phase]) -> Phase:
    """Return the phase of the busiest engine, or "stopped" if any engine has stopped."""
    order: tuple[Phase, ...] = ("stopped", "generating", "prefilling")
    return next((phase for phase in order if phase in phases), "idle")

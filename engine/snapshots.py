"""The state of engines, embedders and all models of a process at the moment of asking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

Phase = Literal["idle", "prefilling", "generating", "stopped"]  # stopped: its thread died, it takes nothing


@dataclass(frozen=True, slots=True)
class SourceDrafts:
    """Draft tokens that one source proposed."""

    drafted: int  # draft tokens that were checked
    accepted: int  # draft tokens that were accepted
    drafts: int  # number of drafts, each of one or more tokens


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The current state of an engine. Reading it never waits, not even during a step.

    Counts start when the engine is created.
    """

    phase: Phase
    slots_total: int
    slots_prefilling: int
    slots_decoding: int
    requests_running: int  # requests that have a slot
    requests_waiting: int  # requests without a slot
    kv_used_tokens: int  # KV cells of running sequences
    kv_cached_tokens: int  # KV cells that idle slots keep for later requests with the same prefix
    kv_total_tokens: int
    ram_states: int  # KV states in RAM
    ram_used_bytes: int
    ram_saves: int
    ram_evictions: int  # KV states removed from RAM because of the quota
    disk_loads: int  # KV states read from disk
    disk_late: int  # KV states read from disk after they had been computed already
    disk_misses: int  # files that were damaged, missing, of another model or of another version
    disk_saves: int  # KV states written to disk
    disk_drops: int  # KV states not written: already on disk, worth less than others, or the disk can't be written
    disk_evictions: int  # files that this process removed because of the quota
    disk_read_bytes: int
    disk_written_bytes: int
    disk_used_bytes: int  # size of cache_dir, some seconds old at most, with states of other models and processes
    disk_quota_bytes: int  # quota of cache_dir
    preemptions: int
    strategy_failures: int  # steps in which the batch strategy failed and another one replaced it
    cache_hits: int  # requests that got a slot and reused a prefix
    cache_hits_slot: int  # hits in the same slot
    cache_hits_copy: int  # hits copied from another slot
    cache_hits_ram: int  # hits from RAM
    cache_hits_disk: int  # hits from disk
    cache_misses: int
    steps: int
    mixed_steps: int  # steps with both decode and prefill tokens
    prompt_tokens: int  # prompt tokens of finished requests
    cached_tokens: int  # prompt tokens of finished requests that were in a cache
    generated_tokens: int
    drafts: Mapping[str, SourceDrafts]  # draft tokens by source
    requests_finished: int
    requests_failed: int
    prompt_rate: float  # prompt tokens computed per second, over the last second of work
    generation_rate: float  # tokens per second, over the last second of work
    mean_slot_s: float  # mean time of recent requests in a slot, in seconds; 0 before the first one

    @property
    def slots_busy(self) -> int:
        """Number of slots that prefill or decode."""
        return self.slots_prefilling + self.slots_decoding


@dataclass(frozen=True, slots=True)
class EmbedderSnapshot:
    """The current state of an embedder or reranker. Reading it never waits, not even during a step.

    Counts start when it is created.
    """

    phase: Phase  # never "generating"
    requests_running: int  # requests of which a text has been started
    requests_waiting: int  # requests of which no text has been started
    texts_waiting: int  # waiting texts of all requests
    steps: int
    texts: int  # computed texts
    prompt_tokens: int  # tokens of these texts
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
    """Sums over all loaded models of a process, including embedders and rerankers."""

    phase: Phase  # of the busiest model; "stopped" if a thread of a model has died
    models: int  # number of loaded models
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
    disk_loads: int
    disk_late: int
    disk_misses: int
    disk_saves: int
    disk_drops: int
    disk_evictions: int
    disk_read_bytes: int
    disk_written_bytes: int
    preemptions: int
    cache_hits: int
    cache_hits_slot: int
    cache_hits_copy: int
    cache_hits_ram: int
    cache_hits_disk: int
    cache_misses: int

    @classmethod
    def sum_of(cls, models: Sequence[ModelSnapshot]) -> ManagerSnapshot:
        """Sum over all engines, embedders and rerankers of these models. A figure that one does not count is 0."""
        parts = [part for model in models for part in model.parts]
        names = [field.name for field in fields(cls) if field.name not in ("phase", "models")]
        sums: dict[str, Any] = {name: sum(getattr(part, name, 0) for part in parts) for name in names}
        return cls(phase=busiest([part.phase for part in parts]), models=len(models), **sums)


def busiest(phases: Sequence[Phase]) -> Phase:
    """The phase of several together; "stopped" if one of them is."""
    order: tuple[Phase, ...] = ("stopped", "generating", "prefilling")
    return next((phase for phase in order if phase in phases), "idle")

"""The state of engines, embedders and all models of a process at the moment of asking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

Phase = Literal["idle", "prefilling", "generating", "stopped"]  # stopped: its thread died, it takes nothing


@dataclass(frozen=True, slots=True)
class SourceDrafts:
    """Tokens that one source guessed."""

    drafted: int  # decoded together with others, before they were chosen
    accepted: int  # of these, that were chosen
    drafts: int  # how often it guessed some


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
    disk_loads: int  # states that were read from the folder, of which …
    disk_late: int  # … came when they were computed already
    disk_misses: int  # files that were damaged, foreign, of another version, or gone
    disk_saves: int  # states that were written
    disk_drops: int  # states that were not: the folder has them, others are worth more, or it can't be written to
    disk_evictions: int  # files that this process removed for the quota
    disk_read_bytes: int
    disk_written_bytes: int
    disk_used_bytes: int  # in the folder, some seconds ago at most: all states, also of other models and processes
    disk_quota_bytes: int  # that these may take
    preemptions: int
    strategy_failures: int  # steps in which a batch strategy failed, and another one replaced it
    cache_hits: int  # admissions that took over a prefix, of which …
    cache_hits_slot: int  # … in the slot where it was
    cache_hits_copy: int  # … from another slot
    cache_hits_ram: int  # … from RAM
    cache_hits_disk: int  # … from the folder of states
    cache_misses: int
    steps: int
    mixed_steps: int  # steps whose batch held decode and prefill tokens
    prompt_tokens: int  # of requests that finished
    cached_tokens: int  # of these, that were not computed again
    generated_tokens: int
    drafts: Mapping[str, SourceDrafts]  # by source: tokens that were guessed
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

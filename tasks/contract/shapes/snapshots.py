"""The snapshots of engines, embedders and models, as JSON objects.

.ci/typed_tasks.py writes this file from engine/snapshots.py, which explains the fields. Do not edit it; run the script.
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

Phase = Literal["idle", "prefilling", "generating", "stopped"]


class DraftTotals(TypedDict):
    """Statistics about the draft tokens proposed by one source."""

    drafted: int
    accepted: int
    drafts: int


class EngineState(TypedDict):
    """The current state of an engine."""

    phase: Phase
    slots_total: int
    slots_prefilling: int
    slots_decoding: int
    requests_running: int
    requests_waiting: int
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
    disk_used_bytes: int
    disk_quota_bytes: int
    preemptions: int
    strategy_failures: int
    cache_hits: int
    cache_hits_slot: int
    cache_hits_copy: int
    cache_hits_ram: int
    cache_hits_disk: int
    cache_misses: int
    steps: int
    mixed_steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafts: dict[str, DraftTotals]
    requests_finished: int
    requests_failed: int
    prompt_rate: float
    generation_rate: float
    mean_slot_s: float


class EmbedderState(TypedDict):
    """The current state of an embedder or reranker."""

    phase: Phase
    requests_running: int
    requests_waiting: int
    texts_waiting: int
    steps: int
    texts: int
    prompt_tokens: int
    requests_finished: int
    requests_failed: int
    prompt_rate: float


class Totals(TypedDict):
    """Totals for all models loaded in a process, including embedders and rerankers."""

    phase: Phase
    models: int
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

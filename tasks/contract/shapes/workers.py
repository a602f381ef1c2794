"""What a live worker tells of itself, as JSON objects: its models, their engines, memory and cores.

Sizes are in bytes, times in unix seconds by the worker's clock. A test holds the fields to those of the engine.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from cellama.config.settings import Capability, OnFull

from .results import CacheHitKind, CacheTier

# stopped: its process ends in a moment; lacking: no worker has it that shall
ModelStatus = Literal["loading", "ready", "unloading", "stopped", "lacking"]
WantedState = Literal["ready", "loading", "lacking", "leaving"]  # leaving: it is loaded, and must be unloaded
Phase = Literal["idle", "prefilling", "generating", "stopped"]
AdapterStatus = Literal["loading", "ready", "unloading"]


class DraftTotals(TypedDict):  # as cellama.engine.snapshots.DraftCount
    drafted: int  # tokens that a source guessed
    accepted: int  # those of them that were chosen
    drafts: int  # how often it guessed some


class CacheState(TypedDict):
    """What an engine keeps of what it has computed, or several do together."""

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


class EngineState(CacheState):
    """As cellama.engine.EngineSnapshot; docs/reference/status.md says what each counts."""

    disk_used_bytes: int
    disk_quota_bytes: int
    phase: Phase
    strategy_failures: int
    slots_total: int
    slots_prefilling: int
    slots_decoding: int
    requests_running: int
    requests_waiting: int
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
    """As cellama.engine.EmbedderSnapshot; docs/reference/status.md says what each counts."""

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


class Totals(CacheState):
    """As cellama.engine.ManagerSnapshot: sums over the models of a worker, or over those of all workers."""

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


class LoadFailure(TypedDict):
    """Why a model or an adapter could not be loaded or unloaded lately (contract.codes)."""

    code: str
    message: str


class WantedThing(TypedDict):
    """A model, or an adapter of a model, that a worker must have, or that it has and must unload.

    `by` says whether it is desired by the worker's settings, by a command for its pool, or by one for it alone.
    """

    model: str
    adapter: str | None
    source: str
    by: Literal["settings", "pool", "worker"]
    state: WantedState
    why: LoadFailure | None  # why it lacks it, or can't unload it; it retries


class DeviceUse(TypedDict):
    """What a model takes of one device; `mapped_bytes` of the weights lie in the page cache, and `saved_bytes` are the
    quota of KV states that are kept in RAM."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    mapped_bytes: int
    saved_bytes: int


class WorkerAdapter(TypedDict):
    """A LoRA adapter of a model on one worker."""

    name: str
    source: str
    status: AdapterStatus
    scale: float  # for jobs that do not choose; 0 = only for those that do
    fingerprint: str  # SHA-256 of the file; "" while it is loading
    size_bytes: int
    in_use: int  # unfinished requests


class AdapterView(WorkerAdapter):
    """The same file with the same scale on all `workers` that have it; `in_use` is the sum."""

    workers: list[str]


class CacheHit(TypedDict):
    """What was taken over of a prompt: how much, and from where."""

    kind: CacheHitKind
    num_tokens: int
    tier: CacheTier | None  # None: cold


class CachedPrefix(TypedDict):
    """How much of a prompt a worker has in its cache."""

    worker: str
    prompt_tokens: int
    cached_tokens: int  # the longest prefix that it need not compute
    tier: CacheTier | None  # where that is; None: nowhere
    tiers: dict[CacheTier, int]  # how much each has


class ModelFile(TypedDict):
    """What is known of a model before it is loaded."""

    id: str
    status: ModelStatus
    source: str
    default: bool  # serves `:default`
    capabilities: list[Capability]


class LoadedModel(TypedDict, total=False):
    """What is known of a model once it is loaded."""

    architecture: str
    description: str  # llama.cpp's own words, for instance "llama 1B Q8_0"
    n_params: int
    size_bytes: int
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    file_type: str  # quantisation, for instance "Q8_0"
    fingerprint: str  # of the file's content
    backend: str  # names of its devices
    threads: int  # in use now
    slots: int  # 0: it does not generate
    ctx_per_slot: int
    follows_replies: bool  # a chat may have a parent_key: its template shows replies as they were
    memory: dict[str, DeviceUse]  # by device
    memory_bytes: int  # on all devices
    load_s: float
    ready_at: float
    last_used_at: float
    tuned: dict[str, int | str]  # options that are as `cellama tune` found them best
    sampling: dict[str, object]  # of jobs that do not say otherwise; what is not here is as for any model
    adapters: list[WorkerAdapter]
    last_cache_hit: CacheHit | None  # of the job that got a slot last; None before the first


class WorkerModel(ModelFile, LoadedModel):
    """A model on one worker. Each of the last three is None while it is loading, and where it has no such part."""

    engine: EngineState | None
    embedder: EmbedderState | None
    reranker: EmbedderState | None


class ModelView(ModelFile, LoadedModel):
    """A model on all `workers` that have it; what differs is of the first of them where it is ready.

    `lacks` has the workers that shall have it, or an adapter of it, and can't, with the reason.
    """

    workers: list[str]
    lacks: dict[str, LoadFailure]


class WorkerDevice(TypedDict):
    """A device with memory of its own, named as ggml names it: "CPU", "CUDA0" …"""

    name: str
    kind: Literal["cpu", "gpu", "integrated gpu"]
    description: str
    total_bytes: int
    free_bytes: int


class WorkerVram(TypedDict):
    """The memory of all GPUs of a worker together, whoever uses it."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


class WorkerMemory(TypedDict):
    """What a worker's models may take; `budget` in bytes is for all devices together. `vram` is None without a GPU."""

    budget: int | Literal["auto", "unlimited"]
    on_full: OnFull
    devices: list[WorkerDevice]
    vram: WorkerVram | None


class ModelMemory(TypedDict):
    """What a model takes; no sizes while it is loading."""

    id: str
    status: ModelStatus
    default: bool
    memory: NotRequired[dict[str, DeviceUse]]  # by device
    memory_bytes: NotRequired[int]  # on all devices


class MemoryView(WorkerMemory):
    """Of the worker of that name: budget, devices, and what its models take of them."""

    worker: str
    models: list[ModelMemory]


class WorkerCores(TypedDict):
    """What other workers of a machine need to know, to share its cores."""

    machine: str  # the same for all containers of it
    processors: list[int]  # on which it may run
    wants: int  # threads
    uses: float  # cores, in the mean of the last seconds
    threads: int  # that it has

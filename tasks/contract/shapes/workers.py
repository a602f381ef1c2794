"""What a live worker reports, as JSON objects: its models, their engines, memory and cores.

Sizes are in bytes, times in unix seconds by the worker's clock. A test compares the fields with those of the engine.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from cellama.config.settings import Capability, OnFull

from .results import CacheHitKind, CacheTier

# stopped: its process exits soon; lacking: no worker that must have it has it
ModelStatus = Literal["loading", "ready", "unloading", "stopped", "lacking"]
WantedState = Literal["ready", "loading", "lacking", "leaving"]  # leaving: it is loaded, and must be unloaded
Phase = Literal["idle", "prefilling", "generating", "stopped"]
AdapterStatus = Literal["loading", "ready", "unloading"]


class DraftTotals(TypedDict):  # as cellama.engine.snapshots.DraftCount
    drafted: int  # draft tokens of a source
    accepted: int  # draft tokens that were accepted
    drafts: int  # number of drafts


class CacheState(TypedDict):
    """The caches of an engine, or of several engines together."""

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
    """The state of an engine, as cellama.engine.EngineSnapshot; docs/reference/status.md explains each count."""

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
    """The state of an embedder, as cellama.engine.EmbedderSnapshot; docs/reference/status.md explains each count."""

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
    """Sums over the models of a worker, or over those of all workers, as cellama.engine.ManagerSnapshot."""

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
    """Why a model or an adapter could not be loaded or unloaded (contract.codes)."""

    code: str
    message: str


class WantedThing(TypedDict):
    """A model, or an adapter of a model, that a worker must have, or that it has and must unload.

    `by` is the origin: the worker's settings, a command for its pool, or a command for this worker.
    """

    model: str  # id of the model
    adapter: str | None  # name of the adapter; None: the model itself
    source: str  # its source
    by: Literal["settings", "pool", "worker"]
    state: WantedState  # ready, loading, lacking (can't be loaded) or leaving (must be unloaded)
    why: LoadFailure | None  # why the worker can't load or unload it; the worker retries


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
    scale: float  # for jobs that do not choose adapters; 0 = only for jobs that do
    fingerprint: str  # SHA-256 of the file; "" while it is loading
    size_bytes: int
    in_use: int  # unfinished requests


class AdapterView(WorkerAdapter):
    """An adapter with the same file and scale on all `workers` that have it; `in_use` is the sum."""

    workers: list[str]


class CacheHit(TypedDict):
    """The part of a prompt that was found in the cache: its length and its tier."""

    kind: CacheHitKind
    num_tokens: int
    tier: CacheTier | None  # None: cold


class CachedPrefix(TypedDict):
    """The part of a prompt that a worker has in its cache."""

    worker: str
    prompt_tokens: int
    cached_tokens: int  # the longest prefix that it does not have to compute
    tier: CacheTier | None  # of that prefix; None: it has none
    tiers: dict[CacheTier, int]  # tokens of the prefix in each tier


class ModelFile(TypedDict):
    """A model before it is loaded."""

    id: str  # id of the model
    status: ModelStatus  # loading, ready, unloading, stopped, or lacking if no worker could load it
    source: str  # its source
    default: bool  # serves `:default`
    capabilities: list[Capability]  # generate, chat, embed, rerank


class LoadedModel(TypedDict, total=False):
    """A loaded model."""

    architecture: str  # for instance llama
    description: str  # by llama.cpp, for instance "llama 1B Q8_0"
    n_params: int  # number of parameters
    size_bytes: int  # size of the weights
    n_ctx_train: int  # training context in tokens
    n_vocab: int  # number of tokens of the vocabulary
    n_embd: int  # dimensions of an embedding
    file_type: str  # quantization, for instance "Q8_0"
    fingerprint: str  # of the file's content
    backend: str  # names of its devices
    threads: int  # in use now
    slots: int  # 0: it only embeds or reranks
    ctx_per_slot: int  # tokens per slot
    follows_replies: bool  # a chat can have a parent_key, because the template repeats replies unchanged
    memory: dict[str, DeviceUse]  # its memory by device
    memory_bytes: int  # its memory on all devices
    load_s: float  # time that loading took
    ready_at: float  # time at which it was ready
    last_used_at: float  # time of its last request
    tuned: dict[str, int | str]  # options that `cellama tune` has set
    sampling: dict[str, object]  # the model's own defaults of sampling parameters
    adapters: list[WorkerAdapter]  # its LoRA adapters
    last_cache_hit: CacheHit | None  # of the last job that got a slot; None before the first job


class WorkerModel(ModelFile, LoadedModel):
    """A model on one worker. A part (engine, embedder, reranker) that it lacks or has not loaded yet is null."""

    engine: EngineState | None  # state of its engine
    embedder: EmbedderState | None  # state of its embedder
    reranker: EmbedderState | None  # state of its reranker


class ModelView(ModelFile, LoadedModel):
    """A model on all `workers` that have it. Values that differ are those of the first worker where it is ready.

    `lacks` has the reasons of workers that must have the model or an adapter of it, and can't load it.
    """

    workers: list[str]
    lacks: dict[str, LoadFailure]


class WorkerDevice(TypedDict):
    """A device with its own memory. `name` is that of ggml: "CPU", "CUDA0" …"""

    name: str
    kind: Literal["cpu", "gpu", "integrated gpu"]
    description: str
    total_bytes: int
    free_bytes: int


class WorkerVram(TypedDict):
    """The memory of all GPUs of a worker together, including what other programs use."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


class WorkerMemory(TypedDict):
    """The memory for a worker's models. `budget` is in bytes, for all devices together. `vram` is None without GPUs."""

    budget: int | Literal["auto", "unlimited"]
    on_full: OnFull
    devices: list[WorkerDevice]
    vram: WorkerVram | None


class ModelMemory(TypedDict):
    """The memory that a model uses. It has no sizes while it is loading."""

    id: str
    status: ModelStatus
    default: bool
    memory: NotRequired[dict[str, DeviceUse]]  # by device
    memory_bytes: NotRequired[int]  # on all devices


class MemoryView(WorkerMemory):
    """The memory of a worker: budget, devices, and what its models use."""

    worker: str
    models: list[ModelMemory]


class WorkerCores(TypedDict):
    """What a worker reports to the other workers of its machine, so that they share its cores."""

    machine: str  # its boot id, which all of its containers share
    processors: list[int]  # on which the worker may run
    wants: int  # threads that it would use alone
    uses: float  # cores, as a mean of the last seconds
    threads: int  # that it uses

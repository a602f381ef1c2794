"""Reports of live workers about their models, engines, memory and cores, as JSON objects.

Sizes are in bytes. Times are in Unix seconds by the worker's clock. A test compares the fields with the engine's
fields.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from cellama.config.settings import Capability, OnFull

from .results import CacheHitKind, CacheTier
from .snapshots import EmbedderState, EngineState

# stopped: its process exits soon; lacking: no worker that must have the model could load it; available: a worker loads
# the model when a job needs it
ModelStatus = Literal["loading", "ready", "unloading", "stopped", "lacking", "available"]
# leaving: it is loaded, and must be unloaded
WantedState = Literal["ready", "loading", "lacking", "leaving", "available"]
AdapterStatus = Literal["loading", "ready", "unloading"]
ChatFeature = Literal["tools", "thinking"]


class LoadFailure(TypedDict):
    """The error from a failed attempt to load or unload a model or adapter (contract.codes)."""

    code: str
    message: str


class WantedThing(TypedDict):
    """A model or adapter that a worker must load or unload.

    `by` is the origin of this requirement: the worker's settings, a command for its pool, or a command for this worker.
    """

    model: str  # id of the model
    adapter: str | None  # name of the adapter; None for the model itself
    source: str  # its source
    by: Literal["settings", "pool", "worker"]
    # ready, loading, lacking (could not be loaded), leaving (must be unloaded) or available (is loaded on demand)
    state: WantedState
    why: LoadFailure | None  # the last failure to load or unload it; the worker retries


class DeviceUse(TypedDict):
    """The memory that a model uses on one device.

    `mapped_bytes` is the part of the weights that is in the page cache. `saved_bytes` is the quota for KV states in
    RAM.
    """

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
    scale: float  # scale for jobs that do not set `adapters`; with 0, only jobs that name it use it
    fingerprint: str  # SHA-256 of the file; "" while it is loading
    size_bytes: int
    in_use: int  # unfinished requests


class AdapterView(WorkerAdapter):
    """An adapter that has the same file and scale on all of these `workers`.

    `in_use` is the sum over these workers.
    """

    workers: list[str]


class CacheHit(TypedDict):
    """The cached part of a prompt: its length and its tier."""

    kind: CacheHitKind
    num_tokens: int
    tier: CacheTier | None  # None for a cold start


class CachedPrefix(TypedDict):
    """The part of a prompt that a worker has in its cache."""

    worker: str
    prompt_tokens: int
    cached_tokens: int  # length of the longest cached prefix
    tier: CacheTier | None  # tier of this prefix; None if there is none
    tiers: dict[CacheTier, int]  # tokens of the prefix in each tier


class ModelFile(TypedDict):
    """The properties of a model that are known before the model is loaded."""

    id: str  # id of the model
    status: (
        ModelStatus  # loading, ready, unloading, stopped, available on demand, or lacking if no worker could load it
    )
    source: str  # its source
    default: bool  # serves `:default`
    capabilities: list[Capability]  # generate, chat, embed, rerank
    on_demand: NotRequired[bool]  # whether workers load it when a job needs it


class LoadedModel(TypedDict, total=False):
    """The properties of a model that are known once the model is loaded."""

    architecture: str  # for example llama
    description: str  # from llama.cpp, for example "llama 1B Q8_0"
    n_params: int  # number of parameters
    size_bytes: int  # size of the weights
    n_ctx_train: int  # training context in tokens
    n_vocab: int  # number of tokens of the vocabulary
    n_embd: int  # dimensions of an embedding
    file_type: str  # quantization, for example "Q8_0"
    fingerprint: str  # SHA-256 of the file
    backend: str  # names of its devices
    threads: int  # number of threads in use
    slots: int  # number of slots; 0 if the model only embeds or reranks
    ctx_per_slot: int  # tokens per slot
    chat_features: list[ChatFeature]  # what the chat template supports: tools, thinking
    follows_replies: bool  # true if chats can have a parent_key, because the template repeats replies unchanged
    memory: dict[str, DeviceUse]  # its memory by device
    memory_bytes: int  # its memory on all devices
    load_s: float  # duration of the load
    ready_at: float  # time at which it became ready
    last_used_at: float  # time of its last request
    tuned: dict[str, int | str]  # options that `cellama tune` has set
    sampling: dict[str, object]  # the model's defaults of sampling parameters
    adapters: list[WorkerAdapter]  # its LoRA adapters
    last_cache_hit: CacheHit | None  # prefix hit of the last job that got a slot; None before the first job


class WorkerModel(ModelFile, LoadedModel):
    """A model on one worker.

    `engine`, `embedder` and `reranker` are null if the model doesn't have them or has not loaded them yet.
    """

    engine: EngineState | None  # state of its engine
    embedder: EmbedderState | None  # state of its embedder
    reranker: EmbedderState | None  # state of its reranker


class ModelView(ModelFile, LoadedModel):
    """A model, summarized over all `workers` that have it.

    If workers report different values, the values come from the first worker on which the model is ready. `lacks`
    contains the errors of workers that must have the model or one of its adapters, but can't load this model or
    adapter.
    """

    workers: list[str]
    lacks: dict[str, LoadFailure]


class WorkerDevice(TypedDict):
    """A device with its own memory. `name` is its name in ggml, for example "CPU" or "CUDA0"."""

    name: str
    kind: Literal["cpu", "gpu", "integrated gpu"]
    description: str
    total_bytes: int
    free_bytes: int


class WorkerVram(TypedDict):
    """The combined memory of a worker's GPUs. `used_bytes` includes the memory that other programs use."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


class WorkerMemory(TypedDict):
    """The memory for a worker's models.

    `budget` is the total for all devices, in bytes. `vram` is None if there are no GPUs.
    """

    budget: int | Literal["auto", "unlimited"]
    on_full: OnFull
    devices: list[WorkerDevice]
    vram: WorkerVram | None


class ModelMemory(TypedDict):
    """The memory that a model uses. The sizes are missing while the model is loading."""

    id: str
    status: ModelStatus
    default: bool
    memory: NotRequired[dict[str, DeviceUse]]  # by device
    memory_bytes: NotRequired[int]  # on all devices


class MemoryView(WorkerMemory):
    """The memory of a worker: its budget, its devices, and the memory of its models."""

    worker: str
    models: list[ModelMemory]


class WorkerCores(TypedDict):
    """A worker's report to the other workers on its machine, which use the report to share the cores."""

    machine: str  # boot id of the machine, which all of its containers share
    processors: list[int]  # processors on which the worker may run
    wants: int  # number of threads that it would use if it were alone
    uses: float  # number of busy cores, averaged over the last seconds
    threads: int  # number of threads that it uses

"""Read the settings from `cellama.toml` and from `CELLAMA_*` environment variables, which take precedence."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from . import limits
from .model_ids import DEFAULT_MODEL, MODEL_ID, MODEL_ID_RULE, parse_aliases, parse_models, with_ids
from .redis_url import mask_url, parse_redis_url

PREFIX = "CELLAMA_"
CONFIG_VARIABLE = "CELLAMA_CONFIG"  # path of the file (default: cellama.toml in the working directory)
DEFAULT_FILE = "cellama.toml"
Capability = Literal["generate", "chat", "embed", "rerank"]
OnFull = Literal["refuse", "evict"]
DEFAULT_SLOTS = 8  # for models without n_parallel that were never tuned
MIN_METRICS_TOKEN_CHARS = 16
SECRETS = {"gateway_metrics_token", "reasoning_key", "hub_token"}
# Browsers send origins in lower case. Extensions and desktop apps have custom schemes.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[a-z0-9.\-\[\]:]+", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class SettingsError(Exception):
    """The settings are invalid. The error message lists every problem with its remedy."""


class AdapterSettings(BaseModel):
    """A model's LoRA adapter. A plain string is shorthand for an adapter with that source and a scale of 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(min_length=1, description="Path to the adapter's GGUF file, or hf://ORG/REPO/FILE.")
    scale: float = Field(
        default=1.0,
        allow_inf_nan=False,
        description="Scale for jobs that don't choose adapters. With 0, only jobs that name the adapter use it.",
    )


def _to_adapter(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


def _from_auto(value: Any) -> Any:
    return None if value == "auto" else value


DEFAULT_KEY_PREFIX = "cellama"
AutoInt = Annotated[int | None, BeforeValidator(_from_auto)]  # "auto" and None let cellama choose


class PlacementSettings(BaseModel):
    """The options that place a model on devices, and that override settings in its file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n_gpu_layers: AutoInt = Field(
        default=None,
        ge=-1,
        description="Number of layers to place on GPUs (auto: as many as fit). -1 places all layers there.",
    )
    devices: tuple[str, ...] | None = Field(
        default=None,
        description="Names of the GPUs to use, in order, as listed by `cellama models plan` (default: all). An empty "
        "list uses only the CPU.",
    )
    split_mode: Literal["none", "layer", "row", "tensor"] = Field(
        default="layer",
        description="Distribution over several GPUs: `none` uses only `main_gpu`, `layer` distributes whole layers, "
        "and `row` and `tensor` split each tensor.",
    )
    tensor_split: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(
        default=None,
        description="Share of the model for each GPU, such as [3, 1] (default: in proportion to the free memory "
        "of each GPU).",
    )
    main_gpu: int = Field(
        default=0, ge=0, description="Index of the GPU to use with the split mode `none`, counted from 0."
    )
    n_cpu_moe: int = Field(
        default=0,
        ge=-1,
        description="Number of layers, from the first, whose experts stay in RAM. -1 keeps the experts of all layers "
        "in RAM.",
    )
    override_tensors: tuple[str, ...] = Field(
        default=(),
        description="Devices for individual tensors, as REGEX=DEVICE. The first regular expression that matches a "
        "tensor's name determines its device.",
    )
    kv_offload: bool = Field(
        default=True, description="Place the KV cache on the GPUs of its layers. If false, it stays in RAM."
    )
    rpc: tuple[str, ...] = Field(
        default=(),
        description="Addresses of llama.cpp RPC servers, as HOST:PORT, whose devices the model uses after the local "
        "GPUs.",
    )
    rpc_public: bool = Field(
        default=False,
        description="Allow RPC servers outside of private networks. Anyone who can reach an RPC server can execute "
        "code on its machine.",
    )
    use_mmap: bool = Field(default=True, description="Map the model file into memory instead of reading it.")
    use_mlock: bool = Field(
        default=False, description="Lock the weights in RAM, so that the operating system never swaps them out."
    )
    kv_overrides: dict[str, bool | int | float | str] | None = Field(
        default=None, description="Values that replace keys of the model file's metadata."
    )
    rope_scaling: Literal["none", "linear", "yarn", "longrope"] | None = Field(
        default=None, description="RoPE scaling method (default: from the model file)."
    )
    rope_freq_base: float | None = Field(
        default=None, gt=0, description="RoPE base frequency (default: from the model file)."
    )
    rope_freq_scale: float | None = Field(
        default=None, gt=0, description="RoPE frequency scaling factor, such as 0.25 to extend the context 4 times."
    )
    yarn_orig_ctx: int | None = Field(
        default=None, ge=1, description="Training context for YaRN, in tokens (default: from the model file)."
    )
    yarn_ext_factor: float | None = Field(
        default=None, ge=0, description="YaRN extrapolation mix factor. 0 interpolates only (default: by llama.cpp)."
    )
    yarn_attn_factor: float | None = Field(
        default=None, ge=0, description="YaRN factor for the attention magnitude (default: by llama.cpp)."
    )
    yarn_beta_fast: float | None = Field(
        default=None, ge=0, description="YaRN low correction dimension (default: by llama.cpp)."
    )
    yarn_beta_slow: float | None = Field(
        default=None, ge=0, description="YaRN high correction dimension (default: by llama.cpp)."
    )


class ModelSettings(PlacementSettings):
    """A model that a worker loads, with its engine options. If an option is None, cellama chooses its value.

    `cellama tune` determines the best values of n_parallel, n_ubatch, threads and kv_layout. Afterwards, cellama uses
    these values for options that are None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(
        min_length=1,
        pattern=MODEL_ID,
        description="Name that jobs and queues use to refer to the model (default: its file name).",
    )
    source: str = Field(min_length=1, description="Path to a GGUF file, hf://ORG/REPO/FILE, or bundled://tiny.")
    hub_cache_dir: str | None = Field(
        default=None,
        description="Directory for files downloaded from the Hugging Face Hub (default: the Hub's own cache).",
    )
    hub_token: str | None = Field(default=None, repr=False, description="Access token for the Hub (default: HF_TOKEN).")
    hub_force: bool = Field(default=False, description="Download files from the Hub even if they are already cached.")
    hub_offline: bool = Field(default=False, description="Use only Hub files that are already cached.")
    default: bool = Field(default=False, description="Use this model for jobs that request `:default`.")
    capabilities: tuple[Capability, ...] | None = Field(
        default=None,
        min_length=1,
        description="Capabilities to serve: generate, chat, embed or rerank (default: all that the model file "
        "supports).",
    )
    adapters: dict[str, Annotated[AdapterSettings, BeforeValidator(_to_adapter)]] = Field(
        default_factory=dict,
        description="LoRA adapters, keyed by name. Each value is a source, or a table with `source` and `scale`.",
    )
    n_parallel: AutoInt = Field(
        default=None,
        ge=1,
        le=256,
        description="Number of slots, which is the maximum number of requests in a batch (auto: 8).",
    )
    n_ctx: int | None = Field(default=None, ge=1, description="Total context size of all slots, in tokens.")
    ctx_per_slot: int | None = Field(default=None, ge=1, description="Context size of each slot, in tokens.")
    kv_layout: Literal["auto", "unified", "partitioned"] = Field(default="auto", description="Layout of the KV cache.")
    cache_prompt: bool = Field(default=True, description="Share prefixes between requests.")
    cache_ram_bytes: AutoInt = Field(
        default=None,
        ge=0,
        description="Quota for KV states in RAM, in bytes (auto: up to 1 GiB). 0 keeps no states in RAM.",
    )
    cache_dir: str | None = Field(
        default=None, min_length=1, description="Directory for KV states on disk (default: the worker's `cache_dir`)."
    )
    cache_disk_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Disk quota for `cache_dir` in bytes (default: the worker's quota). 0 keeps no states on disk.",
    )
    n_batch: int = Field(
        default=2048,
        ge=1,
        description="Maximum number of tokens per step. n_ubatch also limits it, because each step is one micro-batch.",
    )
    n_ubatch: AutoInt = Field(
        default=None, ge=1, description="Maximum number of tokens per micro-batch in llama.cpp (auto: 512)."
    )
    chunk_size: AutoInt = Field(
        default=None,
        ge=1,
        description="Maximum number of prompt tokens per slot in each step, up to n_ubatch (auto: 512 or n_ubatch).",
    )
    bulk_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the slots to reserve for bulk jobs while interactive jobs are waiting. At least one slot "
        "is reserved, unless the share is 0.",
    )
    threads: AutoInt = Field(
        default=None,
        ge=1,
        le=512,
        description="Number of CPU threads (auto: all cores that other workers and programs leave free).",
    )
    flash_attention: Literal["auto", "on", "off"] = Field(
        default="auto", description="Flash attention (auto: on if the device supports it)."
    )
    cache_type_k: CacheType = Field(
        default="f16", description="Data type of the keys in the KV cache. Smaller types save memory."
    )
    cache_type_v: CacheType = Field(
        default="f16", description="Data type of the values in the KV cache. Quantized types require flash attention."
    )
    speculation: Literal["auto", "off"] = Field(
        default="auto",
        description="Speculative decoding. With `auto`, tokens are drafted only while drafting saves time.",
    )
    draft: str | None = Field(
        default=None,
        min_length=1,
        description="Source of a small draft model, which is used in addition to the other methods of drafting tokens.",
    )
    pooling: Literal["auto", "mean", "cls", "last", "none", "rank"] = Field(
        default="auto",
        description="Pooling type for embeddings. `none` returns one vector per token, and `rank` returns only scores.",
    )
    control_tokens_in_text: bool = Field(
        default=False,
        description="Parse control tokens in messages and reranked texts. The authors of such texts can then forge "
        "turns.",
    )
    sampling: dict[str, JsonValue] | None = Field(
        default=None,
        description="Default sampling parameters, such as temperature, for jobs that don't set them. All parameters "
        "except logprobs, n and stop are supported.",
    )
    logits_processors: tuple[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")], ...] = Field(
        default=(),
        description="Import paths of custom logits processors, as package.module:name, in the order in which they run.",
    )
    batch_strategy: str = Field(
        default="adaptive",
        pattern=r"^(adaptive|decode_maximal|prefill_priority|balanced|[\w.]+:\w+)$",
        description="Batch strategy: adaptive, decode_maximal, prefill_priority, balanced, or package.module:Class.",
    )
    on_demand: bool = Field(
        default=False,
        description="Load the model when a job needs it, and unload it when another model needs the memory "
        "(docs/how-to/models-on-demand.md).",
    )
    keep_alive_s: int = Field(
        default=300,
        ge=-1,
        description="Time in seconds after which an idle on-demand model is unloaded. -1 keeps it loaded until another "
        "model needs the memory.",
    )
    preload: bool = Field(
        default=False, description="Load an on-demand model also when the worker starts, if it fits into the memory."
    )
    pinned: bool = Field(default=False, description="Never unload an on-demand model to make room for another model.")


# With a second thread this small model would be slower on a busy machine, because llama.cpp's threads wait for each
# other.
TINY = ModelSettings(id="tiny", source="bundled://tiny", default=True, n_parallel=16, threads=1)


class Settings(BaseModel):
    """All of cellama's settings. `get_settings()` returns an instance.

    Environment variables take precedence over the values that are passed to the constructor.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        repr=False,
        description="URL of the Redis server for jobs and results (docs/redis.md).",
    )
    key_prefix: str = Field(
        default=DEFAULT_KEY_PREFIX,
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="Prefix of all Redis keys and queue names. All processes of an installation must use the same "
        "prefix. Installations that share a database must use different prefixes.",
    )
    models: tuple[ModelSettings, ...] = Field(
        default=(TINY,),
        min_length=1,
        description="Models that a worker loads, as [ID=]SOURCE,…, a JSON list, or [[models]] tables.",
    )
    model_aliases: dict[str, str] = Field(
        default={},
        description='Aliases for models, such as `gpt-4o-mini = "chat"`, as a table, a JSON object, or '
        "ALIAS=MODEL,…. Workers, gateways and producers must use the same aliases.",
    )
    memory_budget: int | Literal["auto", "unlimited"] = Field(
        default="auto",
        description="Memory budget for all models of a worker: auto, unlimited, or a size such as 8GB or 8GiB.",
    )
    cache_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Directory for KV states on disk, which several workers can share (default: none).",
    )
    cache_disk_bytes: int = Field(
        default=8 << 30,
        ge=0,
        description="Disk quota for `cache_dir` in bytes, shared by all workers that use the directory.",
    )
    auto_tune_s: float = Field(
        default=45.0,
        ge=0,
        lt=60,
        description="Time in seconds for tuning each new model while a worker is idle (docs/how-to/performance.md). 0 "
        "disables it.",
    )
    on_full: OnFull = Field(
        default="refuse",
        description="Action when a model does not fit into the memory budget: refuse the model, or evict idle models.",
    )
    swap_after_s: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        description="Time in seconds that jobs for an on-demand model wait before the worker stops a busy on-demand "
        "model to load theirs. The wait is at least 4 times the load time.",
    )
    pool: str = Field(
        default="default",
        min_length=1,
        description="Name of the worker's pool. All workers in a pool load the same models at run time.",
    )
    look_ahead: int = Field(
        default=4,
        ge=0,
        description="Number of jobs per model that a worker prefetches in addition to the jobs in its slots.",
    )
    fairness_weights: dict[str, Annotated[float, Field(gt=0, le=limits.MAX_FAIRNESS_WEIGHT)]] = Field(
        default={},
        description="Weights of fairness keys (docs/fair-share.md), as JSON. The default weight is 1. All workers must "
        "use the same value.",
    )
    fairness_limits: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={},
        description="Maximum number of jobs that all workers together may hold for each fairness key, as JSON. Keys "
        "without an entry are unlimited. All workers must use the same value.",
    )
    model_limits: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={},
        description="Maximum number of jobs that all workers together may hold for each model, as JSON. Models "
        "without an entry are unlimited. All workers must use the same value.",
    )
    over_limit: Literal["wait", "reject"] = Field(
        default="wait",
        description="Handling of jobs that exceed a fairness limit or a model limit. With `wait`, such jobs stay in "
        "the queue. With `reject`, producers reject them, and waiting jobs also count against the limit.",
    )
    default_fairness_key: str = Field(
        default="",
        max_length=64,
        description="Fairness key for a producer's jobs that set neither a key nor a `cache_scope`, such as the name "
        "of your app (docs/fair-share.md).",
    )
    prefill_cost: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Cost of a prompt token relative to the cost of a generated token, for use in fair shares.",
    )
    affinity: bool = Field(
        default=True,
        description="Prefer workers whose cache already contains the prefix of a job's prompt (docs/affinity.md). "
        "Workers and producers must use the same value.",
    )
    default_timeout_s: int = Field(
        default=3600,
        ge=0,
        le=limits.MAX_TIMEOUT_S,
        description="Default job timeout in seconds for priorities 0 to 5. 0 disables it. Bulk jobs have no default "
        "timeout.",
    )
    unserved_timeout_s: int = Field(
        default=1800,
        ge=0,
        le=limits.MAX_TIMEOUT_S,
        description="Time in seconds after which a waiting job fails if no worker serves its model. The value should "
        "be at least four times `lease_s`. 0 disables the timeout. Workers and producers must use the same value.",
    )
    lease_s: int = Field(
        default=6,
        ge=3,
        description="Job lease in seconds. All workers must use the same value. A worker that fails to renew a lease "
        "loses the job.",
    )
    drain_s: int = Field(
        default=30,
        ge=0,
        description="Time in seconds that a stopping worker has to finish its jobs before it hands over the remaining "
        "jobs.",
    )
    hang_s: int = Field(
        default=10,
        ge=0,
        description="Watchdog timeout in seconds. A worker exits if a step of a shared thread, such as an engine "
        "step, exceeds both this timeout and 30 times its usual duration. 0 disables it.",
    )
    max_payload_bytes: int = Field(default=4 << 20, ge=1024, description="Maximum size of a job's JSON in bytes.")
    chat_templates_in_jobs: bool = Field(
        default=False,
        description="Allow jobs to include a `chat_template`. The template runs in a separate process with limited "
        "time and memory. Workers and producers must use the same value.",
    )
    show_prompts: bool = Field(default=False, description="Show prompts and generated text in Flower and in the logs.")
    reasoning_key: SecretStr | None = Field(
        default=None,
        description="Key for signing reasoning, so that workers detect when clients change the "
        "reasoning before they send it back.",
    )
    event_ttl_s: int = Field(
        default=3600, ge=1, description="Time in seconds that a job's event journal is kept after the job has finished."
    )
    journal_ttl_s: int = Field(
        default=86400,
        ge=1,
        description="Time in seconds that Redis keeps an unfinished job's data: the context of its `parent_key`, and "
        "the gateway's record of its response.",
    )
    replay_replies: bool = Field(
        default=True,
        description="When a client sends a reply back, continue the chat from the tokens that the model generated, "
        "including its reasoning. If false, the chat template renders all messages again.",
    )
    journal_max_events: int = Field(
        default=100_000, ge=1, description="Approximate maximum number of events kept per job."
    )
    result_ttl_s: int = Field(default=86400, ge=1, description="Time in seconds that Redis keeps a job's result.")
    middleware: list[Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]] = Field(
        default_factory=list,
        description="Middlewares that workers run, each as package.module:Class (docs/how-to/middleware.md).",
    )
    telemetry_hook: str | None = Field(
        default=None,
        pattern=r"^[\w.]+:\w+$",
        description="Function that workers call with each telemetry event, as package.module:name.",
    )
    telemetry_log: Literal["off", "requests", "steps"] = Field(
        default="off", description="Telemetry events to log as JSON lines. `steps` also logs requests."
    )
    data_dir: Path = Field(
        default_factory=lambda: _default_data_dir(),
        description="Directory for the data of the embedded Redis, the logs of `cellama up`, and the gateway's files "
        "(default: ~/.local/share/cellama).",
    )

    # Logs and traces (docs/operations/monitoring.md)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Log level of each process."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Log format. `json` writes one object per line, including the job and trace ids."
    )
    traces: bool = Field(
        default=False,
        description="Export job spans from workers, gateways and producers with OpenTelemetry. To set the destination, "
        "use OpenTelemetry's environment variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, …).",
    )
    trace_contents: bool = Field(default=False, description="Add prompts and generated text to spans.")

    # Metrics (docs/operations/monitoring.md)
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Port for a worker's `/metrics` endpoint (default: none). Each worker on a machine needs its own "
        "port.",
    )
    metrics_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address on which a worker serves `/metrics`. The endpoint does not require a key.",
    )
    gateway_metrics_token: SecretStr | None = Field(
        default=None,
        description="Bearer token for the gateway's `/metrics` endpoint, at least 16 characters long. Without a "
        "token, only this machine can read the metrics.",
    )
    board_url: str | None = Field(
        default=None, pattern=r"^https?://\S+$", description="URL of the Grafana dashboard that Flower links to."
    )

    # The gateway (docs/how-to/gateway.md)
    gateway_max_body_bytes: int = Field(
        default=16 << 20, ge=1024, description="Maximum size of a request body in bytes."
    )
    gateway_bodies_bytes: int = Field(
        default=512 << 20,
        ge=1024,
        description="Memory limit in bytes for the bodies of all concurrent requests. Further requests get HTTP 503.",
    )
    gateway_key_bodies_bytes: int = Field(
        default=128 << 20,
        ge=1024,
        description="Memory limit in bytes for the bodies of an API key's concurrent requests. Further requests get "
        "HTTP 429.",
    )
    gateway_max_requests: int = Field(
        default=4096,
        ge=1,
        description="Maximum number of concurrent requests, including streams. Further requests get HTTP 503.",
    )
    gateway_head_timeout_s: int = Field(
        default=10,
        ge=1,
        description="Timeout in seconds for receiving a request's headers, after which the connection is closed. The "
        "timeout applies only to `cellama gateway`, because a mounted app relies on its server's timeout.",
    )
    gateway_body_timeout_s: int = Field(
        default=30,
        ge=1,
        description="Time in seconds that a request body may lag behind a rate of 8 KiB per second. After that, the "
        "request gets HTTP 408.",
    )
    gateway_max_wait_s: float = Field(
        default=600,
        ge=0,
        description="Maximum expected wait for a slot, in seconds. Requests that would wait longer get HTTP 429, "
        "except requests in the `flex` tier. 0 disables the limit.",
    )
    gateway_keepalive_s: int = Field(
        default=10,
        ge=1,
        description="Interval in seconds between the keep-alive comments that a stream sends while it is waiting for "
        "tokens.",
    )
    gateway_keys_file: Path | None = Field(
        default=None,
        description="TOML or JSON file with API keys (default: the keys that `cellama keys` stores in Redis).",
    )
    gateway_files_dir: str | None = Field(
        default=None,
        description="Storage for files and batches: a directory that all gateways share, or an fsspec URL such as "
        "`s3://…` (default: `gateway` in `data_dir`).",
    )
    gateway_work_dir: Path | None = Field(
        default=None,
        description="Local directory in which batches run if `gateway_files_dir` is a URL (default: `gateway` in "
        "`data_dir`).",
    )
    gateway_max_file_bytes: int = Field(
        default=200 << 20, ge=1024, description="Maximum size of a batch file in bytes."
    )
    gateway_tenant_files: int = Field(
        default=1000,  # each upload counts the files, which takes Redis about 5 ms for 1000
        ge=1,
        description="Maximum number of files per tenant, including batch results. Further uploads get HTTP 429.",
    )
    gateway_tenant_file_bytes: int = Field(
        default=5 << 30,
        ge=1024,
        description="Maximum total size of a tenant's files in bytes. Further uploads get HTTP 429.",
    )
    gateway_max_batch_lines: int = Field(default=50_000, ge=1, description="Maximum number of requests in a batch.")
    gateway_batches_at_once: int = Field(
        default=4,
        ge=0,
        description="Number of batches that a gateway runs at a time. 0 leaves all batches to other gateways.",
    )
    gateway_user_shares: bool = Field(
        default=False,
        description="Divide each tenant's share among its users (docs/fair-share.md). Requests identify their user in "
        "`user`, `safety_identifier` or `metadata.user_id`.",
    )
    gateway_lease_s: int = Field(
        default=30,
        ge=3,
        le=50,
        description="Batch lease in seconds. If a gateway fails to renew a lease, another gateway resumes the batch.",
    )
    gateway_open_batches: int = Field(
        default=100, ge=1, description="Maximum number of unfinished batches per tenant. Further batches get HTTP 429."
    )
    gateway_cors_origins: list[str] = Field(
        default=[],
        description="Origins whose pages may send requests from a browser, as a JSON list or separated by commas, "
        "for example https://chat.example.org (default: none). `*` allows every origin. Without API keys, these "
        "pages can also make changes.",
    )
    gateway_console: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Serve the console under `/console`: `auto`, `on` or `off`. `auto` serves it if the gateway "
        "checks API keys, or if only this machine can reach the gateway. With `on` but no API keys, every visitor is "
        "an administrator.",
    )
    gateway_webhook_timeout_s: float = Field(
        default=15.0, gt=0, le=60, description="Timeout in seconds for a webhook endpoint to respond."
    )
    gateway_webhook_private: bool = Field(
        default=False, description="Allow webhooks to loopback and private addresses, and over plain HTTP."
    )

    @model_validator(mode="before")
    @classmethod
    def _add_environment(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values | {name: text for name, text in _environment().items() if name in cls.model_fields}

    @field_validator("fairness_weights", "fairness_limits", "model_limits", "middleware", mode="before")
    @classmethod
    def _parse_json(cls, value: Any) -> Any:
        return _json_of(value) if isinstance(value, str) else value

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: str) -> str:
        parse_redis_url(value)
        return value

    @field_validator("models", mode="before")
    @classmethod
    def _parse_models(cls, value: Any) -> Any:
        return with_ids(parse_models(value) if isinstance(value, str) else value)

    @field_validator("model_aliases", mode="before")
    @classmethod
    def _parse_aliases(cls, value: Any) -> Any:
        return parse_aliases(value) if isinstance(value, str) else value

    @field_validator("model_aliases")
    @classmethod
    def _check_aliases(cls, aliases: dict[str, str]) -> dict[str, str]:
        for alias, model in aliases.items():
            if not re.fullmatch(MODEL_ID, alias):
                raise ValueError(f"{alias!r} is not valid, because {MODEL_ID_RULE}; choose another alias")
            if model != DEFAULT_MODEL and not re.fullmatch(MODEL_ID, model):
                raise ValueError(f"{alias!r} refers to {model!r}, which is not a valid model id; correct the id")
            if model in aliases:
                raise ValueError(f"{alias!r} refers to {model!r}, which is also an alias; name the model itself")
        return aliases

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _parse_memory_budget(cls, value: Any) -> Any:
        return _parse_budget(value)

    @field_validator("gateway_metrics_token")
    @classmethod
    def _check_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token) < MIN_METRICS_TOKEN_CHARS:
            raise ValueError(f"the token has {len(token)} characters; use at least {MIN_METRICS_TOKEN_CHARS}")
        return token

    @field_validator("gateway_cors_origins", mode="before")
    @classmethod
    def _parse_origins(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if not value.startswith("["):
            return [origin.strip() for origin in value.split(",") if origin.strip()]
        return _json_of(value)

    @field_validator("gateway_cors_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin; write it as https://chat.example.org, without a path")
        if "*" in origins and len(origins) > 1:
            raise ValueError('"*" allows every origin; remove the other origins')
        return origins

    @model_validator(mode="after")
    def _check_models(self) -> Settings:
        ids = [model.id for model in self.models]
        duplicates = sorted({model_id for model_id in ids if ids.count(model_id) > 1})
        if duplicates:
            raise ValueError(f"models: duplicate id {', '.join(map(repr, duplicates))}; give each model its own id")
        taken = sorted(self.model_aliases.keys() & set(ids))
        if taken:
            raise ValueError(f"model_aliases: {taken[0]!r} is the id of a model; choose another alias")
        if sum(model.default for model in self.models) > 1:
            raise ValueError("models: several models have default = true; set it for only one model")
        return self

    @property
    def default_model(self) -> ModelSettings:
        """Return the model with `default = true`, or the first model."""
        return next((model for model in self.models if model.default), self.models[0])

    @property
    def redis_url_masked(self) -> str:
        """Return `redis_url` without its password, to be displayed or logged."""
        return mask_url(self.redis_url)


def _default_data_dir() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "cellama"


@functools.cache
def get_settings() -> Settings:
    """Return this process's settings, which are read only once. Raises SettingsError, which lists all problems."""
    values = _read_file()
    problems = _unknown_names(values, Settings.model_fields, "in the settings file")
    problems += _unknown_names(_environment(), Settings.model_fields, "in the environment", PREFIX)
    if problems:
        raise SettingsError("\n".join(problems))
    try:
        return Settings(**values)
    except ValidationError as error:
        message = "\n".join(explain(problem) for problem in error.errors())
    raise SettingsError(message)  # outside of the `except`, for the reason given in parse_job


def _environment() -> dict[str, str]:
    """Return the values of the environment variables that contain settings, keyed by the setting's name."""
    found = {name.removeprefix(PREFIX).lower(): text for name, text in os.environ.items() if name.startswith(PREFIX)}
    found.pop(CONFIG_VARIABLE.removeprefix(PREFIX).lower(), None)
    return found


def _read_file() -> dict[str, Any]:
    configured = os.environ.get(CONFIG_VARIABLE)
    path = Path(configured or DEFAULT_FILE)
    if not path.exists():
        if configured:
            raise SettingsError(f"{CONFIG_VARIABLE}: {configured!r} does not exist; correct or unset the variable")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SettingsError(f"the settings file {str(path)!r} can't be read ({error}); correct it") from None


def _unknown_names(names: Any, known: Any, where: str, prefix: str = "") -> list[str]:
    problems = []
    for name in sorted(set(names) - set(known)):
        shown = prefix + name.upper() if prefix else name
        problems.append(f"{shown}: no such setting ({where}); {_hint(name, known, prefix)}")
    return problems


def _hint(name: str, known: Any, prefix: str = "") -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    shown = [prefix + match.upper() if prefix else match for match in close or sorted(known)]
    return f"did you mean {shown[0]}?" if close else f"known: {', '.join(shown)}"


def explain(problem: Any) -> str:
    """Return a one-line description of a pydantic error, which names the setting, its value and the requirement."""
    where = ".".join(str(part) for part in problem["loc"]) or "settings"
    if problem["type"] == "extra_forbidden":
        name = str(problem["loc"][-1])
        return f"{where}: no such setting; {_hint(name, ModelSettings.model_fields)}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing" or not problem["loc"]:
        return f"{where}: {message}" if problem["loc"] else message
    return f"{where} is {_masked(where, problem['input'])}: {message}"


def _masked(where: str, value: Any) -> str:
    """Return the repr of a setting's value, with secrets masked. `where` is the dotted name of the setting."""
    if where == "redis_url":
        return repr(mask_url(str(value)))
    return "***" if where.rpartition(".")[2] in SECRETS else repr(value)


def _json_of(text: str) -> Any:
    """Parse a setting's JSON text. Raises ValueError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the value is not valid JSON: {error}") from None


def _parse_budget(value: Any) -> Any:
    """Return `auto` and `unlimited` unchanged, and convert sizes to bytes. Raises ValueError for anything else."""
    if value in ("auto", "unlimited"):
        return value
    size = _parse_size(str(value))
    if not size:
        raise ValueError("the budget must be auto, unlimited, or a size such as 8GB, 8GiB or 8000000000")
    return size


def _parse_size(text: str) -> int | None:
    """Parse `8GB` (8·10⁹), `8GiB` (8·2³⁰), `8G` (as GB) or plain digits into bytes. Return None for any other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    step = 1024 if match[3] else 1000
    return int(float(match[1]) * step ** " kmgt".index(match[2].lower() or " "))

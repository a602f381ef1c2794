"""Read the settings from the file `cellama.toml` and from environment variables `CELLAMA_*`, which take precedence."""

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
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

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
    """The settings are invalid. The message lists every problem with its remedy."""


class AdapterSettings(BaseModel):
    """A LoRA adapter of a model. A plain string stands for an adapter with that source and a scale of 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(min_length=1, description="Path of the adapter's GGUF file, or hf://ORG/REPO/FILE.")
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


class ModelSettings(BaseModel):
    """A model that a worker loads, and the options of its engine. If an option is None, cellama chooses its value.

    `cellama tune` determines the best values of n_parallel, n_ubatch, threads and kv_layout. Afterwards, cellama uses
    these values for options that are None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(
        min_length=1,
        pattern=MODEL_ID,
        description="Name by which jobs and queues refer to the model (default: name of its file).",
    )
    source: str = Field(min_length=1, description="Path of a GGUF file, hf://ORG/REPO/FILE, or bundled://tiny.")
    hub_cache_dir: str | None = Field(
        default=None, description="Directory for files from the Hugging Face hub (default: the hub's own cache)."
    )
    hub_token: str | None = Field(default=None, repr=False, description="Access token for the hub (default: HF_TOKEN).")
    hub_force: bool = Field(default=False, description="Download files from the hub even if they are in its cache.")
    hub_offline: bool = Field(default=False, description="Use only files that are in the hub's cache.")
    default: bool = Field(default=False, description="Serve jobs for the model `:default`.")
    capabilities: tuple[Capability, ...] | None = Field(
        default=None,
        min_length=1,
        description="Capabilities to serve: generate, chat, embed or rerank (default: all that the file supports).",
    )
    adapters: dict[str, Annotated[AdapterSettings, BeforeValidator(_to_adapter)]] = Field(
        default_factory=dict, description="LoRA adapters by name. Each is a source, or a table with source and scale."
    )
    n_parallel: AutoInt = Field(
        default=None, ge=1, le=256, description="Number of slots, one for each request in a batch (auto: 8)."
    )
    n_ctx: int | None = Field(default=None, ge=1, description="Total context size of all slots, in tokens.")
    ctx_per_slot: int | None = Field(default=None, ge=1, description="Context size of each slot, in tokens.")
    kv_layout: Literal["auto", "unified", "partitioned"] = Field(default="auto", description="Layout of the KV cache.")
    cache_prompt: bool = Field(default=True, description="Share prefixes between requests.")
    cache_ram_bytes: AutoInt = Field(
        default=None, ge=0, description="Quota of KV states in RAM, in bytes (auto: up to 1 GiB). 0 keeps none."
    )
    cache_dir: str | None = Field(
        default=None, min_length=1, description="Directory for KV states on disk (default: the worker's directory)."
    )
    cache_disk_bytes: int | None = Field(
        default=None, ge=0, description="Quota of `cache_dir` in bytes (default: the worker's quota). 0 disables it."
    )
    n_batch: int = Field(
        default=2048, ge=1, description="Maximum number of tokens per step, split into micro-batches of n_ubatch."
    )
    n_ubatch: AutoInt = Field(
        default=None, ge=1, description="Maximum number of tokens per micro-batch in llama.cpp (auto: 512)."
    )
    chunk_size: AutoInt = Field(
        default=None,
        ge=1,
        description="Maximum number of prompt tokens per slot and step, up to n_ubatch (auto: 512 or n_ubatch).",
    )
    bulk_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the slots that bulk jobs keep while interactive jobs wait, at least one slot. 0 "
        "guarantees none.",
    )
    threads: AutoInt = Field(
        default=None, ge=1, le=512, description="Number of CPU threads (auto: all cores, shared with other programs)."
    )
    n_gpu_layers: int = Field(default=-1, ge=-1, description="Number of layers on the GPU. -1 puts all layers there.")
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
        default="off", description="Speculative decoding. auto drafts tokens only while this saves time."
    )
    draft: str | None = Field(
        default=None, min_length=1, description="Source of a small model that also drafts tokens."
    )
    pooling: Literal["auto", "mean", "cls", "last", "none", "rank"] = Field(
        default="auto",
        description="Pooling of embeddings. none returns a vector per token, and rank returns only scores.",
    )
    control_tokens_in_text: bool = Field(
        default=False,
        description="Accept control tokens in messages and reranked texts. This lets their authors forge turns.",
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


# With a second thread this small model would be slower on a busy machine, because llama.cpp's threads wait for each
# other.
TINY = ModelSettings(id="tiny", source="bundled://tiny", default=True, n_parallel=16, threads=1)


class Settings(BaseSettings):
    """All of cellama's settings. `get_settings()` returns them."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=True)

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
    models: Annotated[tuple[ModelSettings, ...], NoDecode] = Field(
        default=(TINY,),
        min_length=1,
        description="Models that a worker loads: [ID=]SOURCE,…, a JSON list, or [[models]] tables.",
    )
    model_aliases: Annotated[dict[str, str], NoDecode] = Field(
        default={},
        description='Other names of models, such as `gpt-4o-mini = "chat"`: a table, a JSON object, or '
        "ALIAS=MODEL,…. Workers, gateways and producers must use the same aliases.",
    )
    memory_budget: int | Literal["auto", "unlimited"] = Field(
        default="auto", description="Memory for all models of a worker: auto, unlimited, or a size such as 8GB or 8GiB."
    )
    cache_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Directory for KV states, which several workers can share (default: none).",
    )
    cache_disk_bytes: int = Field(
        default=8 << 30, ge=0, description="Quota of `cache_dir` in bytes, shared by all workers that use it."
    )
    on_full: OnFull = Field(
        default="refuse", description="Action if a model does not fit into the budget: refuse it, or evict idle models."
    )
    pool: str = Field(
        default="default", min_length=1, description="Worker pool. Its workers load the same models at run time."
    )
    look_ahead: int = Field(
        default=4, ge=0, description="Number of jobs per model that a worker holds beyond the jobs in its slots."
    )
    fairness_weights: dict[str, Annotated[float, Field(gt=0, le=limits.MAX_FAIRNESS_WEIGHT)]] = Field(
        default={},
        description="Weights of fairness keys (docs/fair-share.md), as JSON. The default weight is 1. All workers must "
        "use the same value.",
    )
    fairness_limits: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={},
        description="Largest numbers of jobs that all workers hold at the same time, by fairness key, as JSON. The "
        "default is unlimited. All workers must use the same value.",
    )
    model_limits: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={},
        description="The same limits by model, as JSON.",
    )
    over_limit: Literal["wait", "reject"] = Field(
        default="wait",
        description="What happens to jobs above one of these limits: they wait, or producers reject them. With reject, "
        "jobs that wait for a worker count as well.",
    )
    default_fairness_key: str = Field(
        default="",
        max_length=64,
        description="Fairness key of a producer's jobs that have neither a key nor a `cache_scope`, such as the name "
        "of your app (docs/fair-share.md).",
    )
    prefill_cost: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Cost of a computed prompt token relative to a generated token, for fair shares.",
    )
    affinity: bool = Field(
        default=True,
        description="Prefer the worker that holds the prefix of a job's prompt in its cache (docs/affinity.md). "
        "Workers and producers must use the same value.",
    )
    default_timeout_s: int = Field(
        default=3600,
        ge=0,
        le=limits.MAX_TIMEOUT_S,
        description="Default timeout in seconds for jobs with priorities 0 to 5. 0 disables it. Bulk jobs have no "
        "default timeout.",
    )
    unserved_timeout_s: int = Field(
        default=1800,
        ge=0,
        le=limits.MAX_TIMEOUT_S,
        description="Time in seconds after which a waiting job fails if no worker serves its model, at least four "
        "times `lease_s`. 0 disables it. Workers and producers must use the same value.",
    )
    lease_s: int = Field(
        default=6,
        ge=3,
        description="Job lease in seconds. It must be the same for all workers. A worker that fails to renew it "
        "loses its jobs.",
    )
    drain_s: int = Field(
        default=30,
        ge=0,
        description="Time in seconds that a stopping worker has to finish its jobs before it hands them over.",
    )
    hang_s: int = Field(
        default=10,
        ge=0,
        description="Watchdog timeout in seconds. A worker exits if a step of a shared thread, such as an engine's, "
        "takes longer than this and also longer than 30 times its usual duration. 0 disables it.",
    )
    max_payload_bytes: int = Field(default=4 << 20, ge=1024, description="Maximum size of a job's JSON in bytes.")
    chat_templates_in_jobs: bool = Field(
        default=False,
        description="Accept a `chat_template` in jobs. It runs in a separate process with limited time and memory. "
        "Workers and producers must use the same value.",
    )
    show_prompts: bool = Field(default=False, description="Show prompts and generated text in Flower and in the logs.")
    reasoning_key: SecretStr | None = Field(
        default=None, description="Key that signs reasoning, so that clients can't change it before they send it back."
    )
    event_ttl_s: int = Field(
        default=3600, ge=1, description="Time in seconds that a journal is kept after its job has finished."
    )
    journal_ttl_s: int = Field(
        default=86400,
        ge=1,
        description="Time in seconds that Redis keeps the data of an unfinished job: the context of its `parent_key`, "
        "and the gateway's record of its response.",
    )
    replay_replies: bool = Field(
        default=True,
        description="Continue a chat after the tokens that the model generated, including its reasoning, when a client "
        "sends a reply back. If false, the chat template renders all messages again.",
    )
    journal_max_events: int = Field(
        default=100_000, ge=1, description="Approximate maximum number of events that are kept per job."
    )
    result_ttl_s: int = Field(default=86400, ge=1, description="Time in seconds that a result is kept.")
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
        default="off", description="Telemetry events that are logged as JSON lines. steps includes requests."
    )
    data_dir: Path = Field(
        default_factory=lambda: _default_data_dir(),
        description="Directory of the embedded Redis, the logs of `cellama up` and the gateway's files (default: "
        "~/.local/share/cellama).",
    )

    # Logs and traces (docs/operations/monitoring.md)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Log level of each process."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Log format. json writes an object per line, with the ids of the job and its trace."
    )
    traces: bool = Field(
        default=False,
        description="Send spans of jobs from workers, gateways and producers to OpenTelemetry, whose variables "
        "(`OTEL_EXPORTER_OTLP_ENDPOINT`, …) set the destination.",
    )
    trace_contents: bool = Field(default=False, description="Add prompts and generated text to spans.")

    # Metrics (docs/operations/monitoring.md)
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Port of a worker's `/metrics` (default: none). Each worker on a machine needs its own port.",
    )
    metrics_host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address on which a worker serves `/metrics`. Reading the metrics requires no key.",
    )
    gateway_metrics_token: SecretStr | None = Field(
        default=None,
        description="Bearer token for the gateway's `/metrics`, 16 characters or more. Without it, only this machine "
        "can read the metrics.",
    )
    board_url: str | None = Field(
        default=None, pattern=r"^https?://\S+$", description="URL of the Grafana dashboard that Flower links to."
    )

    # The gateway (docs/how-to/gateway.md)
    gateway_max_body_bytes: int = Field(
        default=16 << 20, ge=1024, description="Maximum size of a request's body in bytes."
    )
    gateway_bodies_bytes: int = Field(
        default=512 << 20,
        ge=1024,
        description="Memory in bytes for the bodies of all current requests. Further requests get 503.",
    )
    gateway_key_bodies_bytes: int = Field(
        default=128 << 20,
        ge=1024,
        description="Memory in bytes for the bodies of one API key's current requests. Further requests get 429.",
    )
    gateway_max_requests: int = Field(
        default=4096,
        ge=1,
        description="Maximum number of concurrent requests, including streams. Further requests get 503.",
    )
    gateway_head_timeout_s: int = Field(
        default=10,
        ge=1,
        description="Timeout in seconds for receiving the head of a request. Then the connection is closed. It applies "
        "to `cellama gateway` only, because a mounted app leaves this timeout to its server.",
    )
    gateway_body_timeout_s: int = Field(
        default=30,
        ge=1,
        description="Time in seconds that a body may lag behind a rate of 8 KiB per second. After that, the request "
        "gets 408.",
    )
    gateway_max_wait_s: int = Field(
        default=600,
        ge=0,
        description="Maximum expected wait for a slot, in seconds. Requests that would wait longer get 429, except "
        "those of the tier `flex`. 0 disables the limit.",
    )
    gateway_keepalive_s: int = Field(
        default=10,
        ge=1,
        description="Interval in seconds between the comments that a stream sends while it has no tokens.",
    )
    gateway_keys_file: Path | None = Field(
        default=None,
        description="TOML or JSON file with API keys (default: those that `cellama keys` stores in Redis).",
    )
    gateway_files_dir: str | None = Field(
        default=None,
        description="Storage for files and batches: a directory that all gateways share, or a URL for fsspec such as "
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
        description="Maximum number of a tenant's files, including results of its batches. Further uploads get 429.",
    )
    gateway_tenant_file_bytes: int = Field(
        default=5 << 30, ge=1024, description="Maximum size in bytes of a tenant's files. Further uploads get 429."
    )
    gateway_max_batch_lines: int = Field(default=50_000, ge=1, description="Maximum number of requests in a batch.")
    gateway_batches_at_once: int = Field(
        default=4, ge=0, description="Number of batches that a gateway runs at a time. 0 leaves them to other gateways."
    )
    gateway_user_shares: bool = Field(
        default=False,
        description="Divide the share of each tenant between its users, which requests name in `user`, "
        "`safety_identifier` or `metadata.user_id` (docs/fair-share.md).",
    )
    gateway_lease_s: int = Field(
        default=30,
        ge=3,
        le=50,
        description="Batch lease in seconds. If a gateway fails to renew it, others resume its batches.",
    )
    gateway_open_batches: int = Field(
        default=100, ge=1, description="Maximum number of a tenant's unfinished batches. Further batches get 429."
    )
    gateway_cors_origins: Annotated[list[str], NoDecode] = Field(
        default=[],
        description="Origins whose pages may send requests from a browser, such as https://chat.example.org, as a JSON "
        "list or separated by commas (default: none). `*` allows every origin. Without API keys, "
        "these pages can also make changes.",
    )
    gateway_console: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Serve the console under `/console`: `auto`, `on` or `off`. `auto` serves it if the gateway checks "
        "API keys or only this machine can reach it. With `on` and without keys, every visitor is an administrator.",
    )
    gateway_webhook_timeout_s: float = Field(
        default=15.0, gt=0, le=60, description="Timeout in seconds for an endpoint to answer a webhook."
    )
    gateway_webhook_private: bool = Field(
        default=False, description="Also send webhooks to loopback and private addresses, and over http."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Give environment variables priority over the file, whose values `get_settings` passes as arguments."""
        return (env_settings, init_settings)

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
                raise ValueError(f"{alias!r} stands for {model!r}, which is not the id of a model; correct it")
            if model in aliases:
                raise ValueError(f"{alias!r} stands for {model!r}, which is also an alias; name the model itself")
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
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"the JSON list is invalid: {error}") from None

    @field_validator("gateway_cors_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin; write it as https://chat.example.org, without a path")
        if "*" in origins and len(origins) > 1:
            raise ValueError('"*" allows every origin; remove the others')
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
            raise ValueError("models: several models have default = true; choose one")
        return self

    @property
    def default_model(self) -> ModelSettings:
        """Return the model with `default = true`, or the first one."""
        return next((model for model in self.models if model.default), self.models[0])

    @property
    def redis_url_masked(self) -> str:
        """Return `redis_url` without its password, to be displayed or logged."""
        return mask_url(self.redis_url)


def _default_data_dir() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "cellama"


@functools.cache
def get_settings() -> Settings:
    """Return the settings of this process, which are read once. Raises SettingsError, which lists all problems."""
    values = _read_file()
    problems = _unknown_names(values, Settings.model_fields, "in the settings file")
    environment = {name.removeprefix(PREFIX).lower() for name in os.environ if name.startswith(PREFIX)}
    environment.discard(CONFIG_VARIABLE.removeprefix(PREFIX).lower())
    problems += _unknown_names(environment, Settings.model_fields, "in the environment", PREFIX)
    if problems:
        raise SettingsError("\n".join(problems))
    try:
        return Settings(**values)
    except ValidationError as error:
        message = "\n".join(explain(problem) for problem in error.errors())
    raise SettingsError(message)  # outside of the `except`, for the reason given in parse_job


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
    """Describe a problem found by pydantic in one line, with the setting, its value and the requirement."""
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


def _parse_budget(value: Any) -> Any:
    """Return `auto` and `unlimited` unchanged, and sizes in bytes. Raises ValueError for anything else."""
    if value in ("auto", "unlimited"):
        return value
    size = _parse_size(str(value))
    if not size:
        raise ValueError("the budget must be auto, unlimited, or a size such as 8GB, 8GiB or 8000000000")
    return size


def _parse_size(text: str) -> int | None:
    """Parse `8GB` (8·10⁹), `8GiB` (8·2³⁰), `8G` (as GB) or plain digits into bytes. Return None for other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    step = 1024 if match[3] else 1000
    return int(float(match[1]) * step ** " kmgt".index(match[2].lower() or " "))

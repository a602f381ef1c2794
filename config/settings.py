"""The one settings class: environment `CELLAMA_*` over the file `cellama.toml` over defaults."""

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
from .model_ids import MODEL_ID, parse_models, with_ids
from .redis_url import mask_url, parse_redis_url

PREFIX = "CELLAMA_"
CONFIG_VARIABLE = "CELLAMA_CONFIG"  # names the file; default: cellama.toml in the working folder
DEFAULT_FILE = "cellama.toml"
Capability = Literal["generate", "chat", "embed", "rerank"]
OnFull = Literal["refuse", "evict"]
DEFAULT_SLOTS = 8  # of a model that leaves n_parallel to us, and was never tuned
MIN_METRICS_TOKEN_CHARS = 16
SECRETS = {"gateway_metrics_token", "reasoning_key", "hub_token"}
# Browsers write origins in small letters; extensions and desktop apps have schemes of their own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[a-z0-9.\-\[\]:]+", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class SettingsError(Exception):
    """The settings are wrong; the message lists every problem with its remedy."""


class AdapterSettings(BaseModel):
    """A LoRA adapter of a model; its source alone will do where the scale is 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(min_length=1, description="path of an adapter's GGUF file, or hf://ORG/REPO/FILE")
    scale: float = Field(default=1.0, allow_inf_nan=False, description="for jobs that do not choose; 0 = not for them")


def _to_adapter(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


def _from_auto(value: Any) -> Any:
    return None if value == "auto" else value


DEFAULT_KEY_PREFIX = "cellama"
AutoInt = Annotated[int | None, BeforeValidator(_from_auto)]  # "auto" and None: choose for me


class ModelSettings(BaseModel):
    """One model that a worker loads, and how its engine is set up. None stands for "choose for me".

    n_parallel, n_ubatch, threads and kv_layout are then as `cellama tune` found them best, if it was run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, pattern=MODEL_ID, description="its name in queues and calls; default: its file's")
    source: str = Field(min_length=1, description="path of a GGUF file, hf://ORG/REPO/FILE, or bundled://tiny")
    hub_cache_dir: str | None = Field(default=None, description="of files from the hub; default: the hub's own")
    hub_token: str | None = Field(default=None, repr=False, description="for the hub; default: HF_TOKEN")
    hub_force: bool = Field(default=False, description="fetch from the hub what is in the cache already")
    hub_offline: bool = Field(default=False, description="use the hub's cache only")
    default: bool = Field(default=False, description="serves jobs for the model `:default`")
    capabilities: tuple[Capability, ...] | None = Field(
        default=None, min_length=1, description="generate, chat, embed, rerank; default: what suits the file"
    )
    adapters: dict[str, Annotated[AdapterSettings, BeforeValidator(_to_adapter)]] = Field(
        default_factory=dict, description="LoRA adapters by name: their sources, or tables with source and scale"
    )
    n_parallel: AutoInt = Field(default=None, ge=1, le=256, description="slots: requests in one batch; auto: 8")
    n_ctx: int | None = Field(default=None, ge=1, description="context of all slots together, in tokens")
    ctx_per_slot: int | None = Field(default=None, ge=1, description="context of each slot, in tokens")
    kv_layout: Literal["auto", "unified", "partitioned"] = Field(default="auto", description="of the KV cache")
    cache_prompt: bool = Field(default=True, description="share prefixes between requests")
    cache_ram_bytes: AutoInt = Field(
        default=None, ge=0, description="quota of KV states kept in RAM; 0 = none; auto: up to 1 GiB of what is left"
    )
    cache_dir: str | None = Field(default=None, min_length=1, description="folder of KV states; default: the worker's")
    cache_disk_bytes: int | None = Field(
        default=None, ge=0, description="quota of that folder; 0 = no states on disk; default: that of the worker"
    )
    n_batch: int = Field(default=2048, ge=1, description="tokens per step, as far as n_ubatch goes")
    n_ubatch: AutoInt = Field(default=None, ge=1, description="tokens per pass inside llama.cpp; auto: 512")
    chunk_size: AutoInt = Field(
        default=None, ge=1, description="prompt tokens per slot and step, up to n_ubatch; auto: 512, if that allows it"
    )
    threads: AutoInt = Field(
        default=None, ge=1, le=512, description="CPU threads; auto: all cores, shared with other workers and programs"
    )
    n_gpu_layers: int = Field(default=-1, ge=-1, description="layers on the GPU; -1 = all")
    flash_attention: Literal["auto", "on", "off"] = Field(default="auto", description="auto: where the device has it")
    cache_type_k: CacheType = Field(default="f16", description="of the keys in the KV cache; smaller ones save memory")
    cache_type_v: CacheType = Field(
        default="f16", description="of the values in the KV cache; quantized ones need flash attention"
    )
    speculation: Literal["auto", "off"] = Field(default="off", description="auto: guess tokens where that pays")
    draft: str | None = Field(default=None, min_length=1, description="source of a small model that guesses as well")
    pooling: Literal["auto", "mean", "cls", "last", "none", "rank"] = Field(
        default="auto", description="of embeddings; none = a vector per token, rank = no embeddings, scores"
    )
    control_tokens_in_text: bool = Field(
        default=False, description="messages and reranked texts may write control tokens, and so forge turns"
    )
    sampling: dict[str, JsonValue] | None = Field(
        default=None,
        description="of jobs that do not say otherwise: temperature, top_k, … grammar_root; all but logprobs, n, stop",
    )
    logits_processors: tuple[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")], ...] = Field(
        default=(), description="own logits processors by import path, package.module:name, in the order of use"
    )
    batch_strategy: str = Field(
        default="adaptive",
        pattern=r"^(adaptive|decode_maximal|prefill_priority|balanced|[\w.]+:\w+)$",
        description="adaptive, decode_maximal, prefill_priority, balanced, or package.module:Class",
    )


# A second thread makes so small a model slower when anything else runs: llama.cpp's threads wait for each other.
TINY = ModelSettings(id="tiny", source="bundled://tiny", default=True, n_parallel=16, threads=1)


class Settings(BaseSettings):
    """Everything that can be configured. Made by `get_settings()`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=True)

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0", repr=False, description="broker, results, events; see docs/redis.md"
    )
    key_prefix: str = Field(
        default=DEFAULT_KEY_PREFIX,
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="first part of all Redis keys and queue names; installations that share a database need different "
        "ones. The workers, producers and gateways of an installation need the same one",
    )
    models: Annotated[tuple[ModelSettings, ...], NoDecode] = Field(
        default=(TINY,),
        min_length=1,
        description="what a worker loads: [ID=]SOURCE,…, a JSON list, or [[models]] tables",
    )
    memory_budget: int | Literal["auto", "unlimited"] = Field(
        default="auto", description="for all models of a worker: auto, unlimited, or a size such as 8GB or 8GiB"
    )
    cache_dir: str | None = Field(
        default=None, min_length=1, description="folder of KV states on disk, which workers may share; default: none"
    )
    cache_disk_bytes: int = Field(default=8 << 30, ge=0, description="quota of that folder, for all that share it")
    on_full: OnFull = Field(default="refuse", description="a model that does not fit: refuse it, or evict idle ones")
    pool: str = Field(default="default", min_length=1, description="its workers have the same models at run time")
    look_ahead: int = Field(default=4, ge=0, description="jobs of a model that a worker takes beyond its slots")
    default_timeout_s: int = Field(
        default=3600,
        ge=0,
        le=limits.MAX_TIMEOUT_S,
        description="`timeout` of jobs with priorities 0 to 5 that name none; 0 = none; bulk jobs have none",
    )
    lease_s: int = Field(default=6, ge=3, description="a worker silent for so long loses its jobs; alike for all")
    drain_s: int = Field(default=30, ge=0, description="after so long an ending worker gives its jobs to others")
    hang_s: int = Field(
        default=10,
        ge=0,
        description="a thread that serves many and makes no step for so long, and for 30 times as long as before, "
        "ends its worker; 0 = never",
    )
    max_payload_bytes: int = Field(default=4 << 20, ge=1024, description="size of a job, as JSON")
    show_prompts: bool = Field(default=False, description="let Flower and the logs show prompts and texts")
    reasoning_key: SecretStr | None = Field(
        default=None, description="signs reasoning, so that it can't be changed by those who send it back"
    )
    event_ttl_s: int = Field(default=3600, ge=1, description="life of a journal after the end of its job")
    journal_ttl_s: int = Field(
        default=86400,
        ge=1,
        description="seconds for which Redis keeps what an unfinished job builds on: the context of its "
        "`parent_key`, and the gateway's record of its response",
    )
    journal_max_events: int = Field(default=100_000, ge=1, description="events kept per job, about")
    result_ttl_s: int = Field(default=86400, ge=1, description="life of a result")
    middleware: list[Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]] = Field(
        default_factory=list,
        description="package.module:Class of each middleware that workers run (docs/how-to/middleware.md)",
    )
    telemetry_hook: str | None = Field(
        default=None, pattern=r"^[\w.]+:\w+$", description="package.module:name, called in workers with each event"
    )
    telemetry_log: Literal["off", "requests", "steps"] = Field(
        default="off", description="events as lines of JSON in the log: of requests, or of steps, too"
    )
    data_dir: Path = Field(
        default_factory=lambda: _default_data_dir(),
        description="of the embedded Redis, logs of `cellama up`, the gateway's files; default: ~/.local/share/cellama",
    )

    # Logs and traces (docs/operations/monitoring.md)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO", description="of every process")
    log_format: Literal["text", "json"] = Field(
        default="text", description="json: each line is an object, with the job's id and its trace's where there are"
    )
    traces: bool = Field(
        default=False,
        description="spans of jobs for OpenTelemetry, in workers, gateways and who sends jobs; its own variables "
        "(`OTEL_EXPORTER_OTLP_ENDPOINT`, …) say where they go",
    )
    trace_contents: bool = Field(default=False, description="spans have prompts and what was generated, too")

    # Metrics (docs/operations/monitoring.md)
    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="of a worker's `/metrics`; each of a machine has its own; default: none",
    )
    metrics_host: str = Field(
        default="127.0.0.1", min_length=1, description="address of that port; whoever reaches it reads it without a key"
    )
    gateway_metrics_token: SecretStr | None = Field(
        default=None,
        description="opens the gateway's `/metrics` (`Authorization: Bearer …`), 16 characters or more; default: it is "
        "for this machine only",
    )
    board_url: str | None = Field(
        default=None, pattern=r"^https?://\S+$", description="of the board in Grafana: Flower links to it"
    )

    # The gateway (docs/how-to/gateway.md)
    gateway_max_body_bytes: int = Field(default=16 << 20, ge=1024, description="size of a request's body over HTTP")
    gateway_bodies_bytes: int = Field(
        default=512 << 20,
        ge=1024,
        description="memory for the bodies of all requests that are being handled; more get 503",
    )
    gateway_key_bodies_bytes: int = Field(
        default=128 << 20, ge=1024, description="the same for the requests of one API key; more get 429"
    )
    gateway_max_requests: int = Field(
        default=4096, ge=1, description="requests that are handled at the same time, streams included; more get 503"
    )
    gateway_head_timeout_s: int = Field(
        default=10,
        ge=1,
        description="seconds that a connection may take to send the head of a request; then it is closed. Of "
        "`cellama gateway` only: an app that is mounted leaves this to its server",
    )
    gateway_body_timeout_s: int = Field(
        default=30,
        ge=1,
        description="seconds that a body may stay behind 8 KiB per second; then the request gets 408",
    )
    gateway_max_wait_s: int = Field(
        default=600,
        ge=0,
        description="requests that would wait longer for a slot get 429, but for those of the tier `flex`; 0 = none do",
    )
    gateway_keepalive_s: int = Field(
        default=10, ge=1, description="after so long without a token a stream gets a comment, the first time, too"
    )
    gateway_keys_file: Path | None = Field(
        default=None, description="TOML or JSON with API keys; default: those that `cellama keys` keeps in Redis"
    )
    gateway_files_dir: str | None = Field(
        default=None,
        description="where files and batches lie: a directory that all gateways see, or a URL for fsspec (`s3://…`); "
        "default: `gateway` in `data_dir`",
    )
    gateway_work_dir: Path | None = Field(
        default=None,
        description="where batches run if `gateway_files_dir` is a URL: a directory of this machine; default: "
        "`gateway` in `data_dir`",
    )
    gateway_max_file_bytes: int = Field(default=200 << 20, ge=1024, description="size of a file for batches")
    gateway_tenant_files: int = Field(
        default=1000,  # each upload counts them: some 5 ms of Redis' time for as many
        ge=1,
        description="files that a tenant may have, those of its batches' answers included; more uploads get 429",
    )
    gateway_tenant_file_bytes: int = Field(
        default=5 << 30, ge=1024, description="size of all files that a tenant may have; more uploads get 429"
    )
    gateway_max_batch_lines: int = Field(default=50_000, ge=1, description="requests in a file for batches")
    gateway_batches_at_once: int = Field(
        default=4, ge=0, description="batches that one gateway drives at the same time; 0 = it leaves them to others"
    )
    gateway_lease_s: int = Field(
        default=30, ge=3, le=50, description="after so long without a sign of its gateway another one drives a batch"
    )
    gateway_open_batches: int = Field(
        default=100, ge=1, description="batches of a tenant that have not ended; more are refused with 429"
    )
    gateway_cors_origins: Annotated[list[str], NoDecode] = Field(
        default=[],
        description="origins, such as https://chat.example.org, whose pages may ask from a browser, and change things "
        "without a key: a JSON list, or with commas between them; `*` is every one. Default: none",
    )
    gateway_webhook_timeout_s: float = Field(
        default=15.0, gt=0, le=60, description="time for an endpoint to answer a webhook"
    )
    gateway_webhook_private: bool = Field(
        default=False, description="webhooks may go to loopback and private addresses, too, and over http"
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
        """Environment first; what the file says comes in as init arguments (see `get_settings`)."""
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

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _parse_memory_budget(cls, value: Any) -> Any:
        return _parse_budget(value)

    @field_validator("gateway_metrics_token")
    @classmethod
    def _check_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token) < MIN_METRICS_TOKEN_CHARS:
            raise ValueError(f"it has {len(token)} characters; it must have {MIN_METRICS_TOKEN_CHARS} or more")
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
            raise ValueError(f"it begins as a JSON list, and is none: {error}") from None

    @field_validator("gateway_cors_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin; write it as https://chat.example.org, without a path")
        if "*" in origins and len(origins) > 1:
            raise ValueError('"*" is every origin; leave the others out')
        return origins

    @model_validator(mode="after")
    def _check_models(self) -> Settings:
        ids = [model.id for model in self.models]
        twice = sorted({model_id for model_id in ids if ids.count(model_id) > 1})
        if twice:
            raise ValueError(f"models: {', '.join(map(repr, twice))} stand(s) there more than once; ids must differ")
        if sum(model.default for model in self.models) > 1:
            raise ValueError("models: more than one has default = true; choose one")
        return self

    @property
    def default_model(self) -> ModelSettings:
        """The model that says so, else the first."""
        return next((model for model in self.models if model.default), self.models[0])

    @property
    def redis_url_masked(self) -> str:
        """The URL for people and logs: without its password."""
        return mask_url(self.redis_url)


def _default_data_dir() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "cellama"


@functools.cache
def get_settings() -> Settings:
    """The settings of this process, read once. Raises SettingsError with all problems at once."""
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
    raise SettingsError(message)  # not within the `except`: see parse_job


def _read_file() -> dict[str, Any]:
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named or DEFAULT_FILE)
    if not path.exists():
        if named:
            raise SettingsError(f"{CONFIG_VARIABLE} names {named!r}, but there is no such file; correct or unset it")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SettingsError(f"the settings file {str(path)!r} can't be read: {error}") from None


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
    """One line for one problem of pydantic: setting, value, what it must be."""
    where = ".".join(str(part) for part in problem["loc"]) or "settings"
    if problem["type"] == "extra_forbidden":
        name = str(problem["loc"][-1])
        return f"{where}: no such setting; {_hint(name, ModelSettings.model_fields)}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing" or not problem["loc"]:
        return f"{where}: {message}" if problem["loc"] else message
    return f"{where} is {_masked(where, problem['input'])}: {message}"


def _masked(where: str, value: Any) -> str:
    """Return the repr of a setting's value, with secrets masked; `where` is the dotted name of the setting."""
    if where == "redis_url":
        return repr(mask_url(str(value)))
    return "***" if where.rpartition(".")[2] in SECRETS else repr(value)


def _parse_budget(value: Any) -> Any:
    """Return `auto` and `unlimited` unchanged, and sizes in bytes. Raises ValueError for anything else."""
    if value in ("auto", "unlimited"):
        return value
    size = _parse_size(str(value))
    if not size:
        raise ValueError("it must be auto, unlimited, or a size such as 8GB, 8GiB or 8000000000")
    return size


def _parse_size(text: str) -> int | None:
    """Return the bytes of `8GB` (8·10⁹), `8GiB` (8·2³⁰), `8G` (as GB) or plain digits; None if it is not a size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    step = 1024 if match[3] else 1000
    return int(float(match[1]) * step ** " kmgt".index(match[2].lower() or " "))

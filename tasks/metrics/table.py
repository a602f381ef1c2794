"""The one table of all metrics: docs/reference/metrics.md, families, board and alerts are held to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]
Source = Literal["engine", "step", "request", "attempt", "worker", "redis", "gateway"]

# vLLM's (vllm/v1/metrics/loggers.py), so that its boards show ours.
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
REQUEST_TOKENS = tuple(float(step * power) for power in (1, 10, 100, 1000, 10_000, 100_000) for step in (1, 2, 5))
COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0)
# Ours: from a millisecond to an hour, about threefold each.
FINE_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    *(1800.0, 3600.0),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One metric: its whole name (of a counter with `_total`), what it counts, its labels, and who counts it."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    source: Source
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram's buckets, but the last one's
    field: str = ""  # of a snapshot, if it is read off there


ENGINE = ("model_name", "engine")  # vLLM's labels
MODEL = ("model",)


def _of(kind: MetricKind, source: Source, labels: tuple[str, ...], *metrics: tuple[str, ...]) -> tuple[Row, ...]:
    """Rows of name, help and perhaps a snapshot's field."""
    return tuple(Row(name, kind, text, labels, source, field="".join(field)) for name, text, *field in metrics)


def _histogram(name: str, text: str, bounds: tuple[float, ...], source: Source, *labels: str) -> Row:
    return Row(name, "histogram", text, labels, source, bounds)


VLLM = (
    *_of(
        "gauge",
        "engine",
        ENGINE,
        ("vllm:num_requests_running", "requests that have a slot", "requests_running"),
        ("vllm:num_requests_waiting", "requests in the worker without a slot", "requests_waiting"),
        ("vllm:kv_cache_usage_perc", "part of the KV cells that running sequences hold, 0 to 1"),
    ),
    Row(
        "vllm:cache_config_info",
        "gauge",
        "1; how the KV cache is set up",
        (*ENGINE, "num_gpu_blocks", "block_size", "enable_prefix_caching"),
        "engine",
    ),
    *_of(
        "counter",
        "engine",
        ENGINE,
        ("vllm:generation_tokens_total", "tokens generated, as they come", "generated_tokens"),
        ("vllm:num_preemptions_total", "sequences whose slot a more urgent one took", "preemptions"),
        ("vllm:spec_decode_num_drafts_total", "drafts: guesses for a sequence, decoded with others"),
        ("vllm:spec_decode_num_draft_tokens_total", "their tokens"),
        ("vllm:spec_decode_num_accepted_tokens_total", "of these, that were chosen"),
    ),
    *_of(
        "counter",
        "request",
        ENGINE,
        ("vllm:prompt_tokens_total", "prompt tokens of requests that ended, cached ones included"),
        ("vllm:prompt_tokens_cached_total", "of these, that were not computed again"),
        ("vllm:prefix_cache_queries_total", "prompt tokens that were looked for in slots"),
        ("vllm:prefix_cache_hits_total", "of these, that were found in a slot"),
        ("vllm:external_prefix_cache_queries_total", "prompt tokens in no slot: looked for elsewhere"),
        ("vllm:external_prefix_cache_hits_total", "of these, that were found there"),
    ),
    Row(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "of the requests without a slot: all are capacity, none is deferred",
        (*ENGINE, "reason"),
        "engine",
    ),
    Row(
        "vllm:prompt_tokens_by_source_total",
        "counter",
        "prompt tokens: local_compute, local_cache_hit (in a slot), external_kv_transfer (from RAM or the folder)",
        (*ENGINE, "source"),
        "request",
    ),
    Row(
        "vllm:request_success_total",
        "counter",
        "requests that ended: stop, length, abort (cancelled, timeout), error",
        (*ENGINE, "finished_reason"),
        "request",
    ),
    _histogram("vllm:time_to_first_token_seconds", "from submission to the first token", TTFT_S, "request", *ENGINE),
    _histogram(
        "vllm:inter_token_latency_seconds",
        "between two steps in which a sequence decoded",
        TOKEN_S,
        "step",
        *ENGINE,
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "mean of a request, after its first token",
        TOKEN_S,
        "request",
        *ENGINE,
    ),
    _histogram("vllm:e2e_request_latency_seconds", "from submission to the end", REQUEST_S, "request", *ENGINE),
    _histogram("vllm:request_queue_time_seconds", "from submission to a slot", REQUEST_S, "request", *ENGINE),
    _histogram("vllm:request_inference_time_seconds", "from the slot to the end", REQUEST_S, "request", *ENGINE),
    _histogram("vllm:request_prefill_time_seconds", "from the slot to the first token", REQUEST_S, "request", *ENGINE),
    _histogram("vllm:request_decode_time_seconds", "from the first token to the end", REQUEST_S, "request", *ENGINE),
    _histogram("vllm:iteration_tokens_total", "tokens of a step's batch", STEP_TOKENS, "step", *ENGINE),
    _histogram("vllm:request_prompt_tokens", "of a request", REQUEST_TOKENS, "request", *ENGINE),
    _histogram(
        "vllm:request_generation_tokens", "of a request, all its completions", REQUEST_TOKENS, "request", *ENGINE
    ),
    _histogram("vllm:request_params_n", "completions that a request asked for", COMPLETIONS, "request", *ENGINE),
)

ENGINES = (
    *_of(
        "gauge",
        "engine",
        MODEL,
        ("cellama_slots", "slots of the engine", "slots_total"),
        ("cellama_slots_prefilling", "slots that read a prompt", "slots_prefilling"),
        ("cellama_slots_decoding", "slots that generate", "slots_decoding"),
        ("cellama_kv_cells_used", "KV cells of running sequences", "kv_used_tokens"),
        ("cellama_kv_cells_cached", "KV cells that idle slots keep for whoever begins alike", "kv_cached_tokens"),
        ("cellama_kv_cells", "KV cells", "kv_total_tokens"),
        ("cellama_ram_states", "KV states saved in RAM", "ram_states"),
        ("cellama_ram_bytes", "what they take", "ram_used_bytes"),
        ("cellama_disk_bytes", "KV states in the folder, also of others that share it", "disk_used_bytes"),
        ("cellama_disk_quota_bytes", "what these may take", "disk_quota_bytes"),
        ("cellama_prompt_tokens_per_second", "computed, in the last second of work", "prompt_rate"),
        ("cellama_generated_tokens_per_second", "in the last second of work", "generation_rate"),
        ("cellama_model_up", "1; 0 if the model's thread died"),
        ("cellama_model_bytes", "memory of the model on all devices"),
    ),
    *_of(
        "counter",
        "engine",
        MODEL,
        ("cellama_steps_total", "steps of the engine", "steps"),
        ("cellama_mixed_steps_total", "of these, that both read and generated", "mixed_steps"),
        (
            "cellama_batch_strategy_failures_total",
            "steps in which a batch strategy failed, and another one replaced it",
            "strategy_failures",
        ),
        ("cellama_ram_saves_total", "states saved in RAM", "ram_saves"),
        ("cellama_ram_evictions_total", "states dropped for the quota of RAM", "ram_evictions"),
        ("cellama_disk_loads_total", "states read from the folder", "disk_loads"),
        ("cellama_disk_late_total", "of these, that came when they were computed already", "disk_late"),
        ("cellama_disk_misses_total", "files that were damaged, foreign or gone", "disk_misses"),
        ("cellama_disk_saves_total", "states written to the folder", "disk_saves"),
        ("cellama_disk_drops_total", "states that were not written", "disk_drops"),
        ("cellama_disk_evictions_total", "files removed for the quota", "disk_evictions"),
        ("cellama_disk_read_bytes_total", "read from the folder", "disk_read_bytes"),
        ("cellama_disk_written_bytes_total", "written to the folder", "disk_written_bytes"),
        ("cellama_requests_failed_total", "requests that ended with an error", "requests_failed"),
    ),
    Row(
        "cellama_prefix_lookups_total",
        "counter",
        "admissions, by where a prefix was: slot, copy, ram, disk, miss",
        ("model", "tier"),
        "engine",
    ),
    Row(
        "cellama_draft_tokens_total",
        "counter",
        "tokens guessed, by source and whether they were chosen",
        ("model", "source", "accepted"),
        "engine",
    ),
    *_of(
        "gauge",
        "engine",
        ("model", "part"),
        ("cellama_texts_waiting", "texts that an embedder or a reranker has not read", "texts_waiting"),
    ),
    *_of(
        "counter",
        "engine",
        ("model", "part"),
        ("cellama_texts_total", "texts that were read", "texts"),
        ("cellama_text_tokens_total", "their tokens", "prompt_tokens"),
        ("cellama_text_requests_total", "requests that ended well", "requests_finished"),
        ("cellama_text_requests_failed_total", "requests that failed", "requests_failed"),
    ),
    Row(
        "cellama_requests_total", "counter", "requests that ended, by our words", ("model", "finish_reason"), "request"
    ),
    _histogram("cellama_first_token_seconds", "from submission to the first token", FINE_S, "request", "model"),
    _histogram("cellama_token_gap_seconds", "between two steps in which a sequence decoded", FINE_S, "step", "model"),
    _histogram("cellama_prefix_wait_seconds", "while others computed a prefix, if any", FINE_S, "request", "model"),
)

ATTEMPTS = (
    Row(
        "cellama_attempts_total",
        "counter",
        "attempts that began, by whether the job had one before",
        ("model", "class", "first"),
        "attempt",
    ),
    Row(
        "cellama_attempt_ends_total",
        "counter",
        "success, failure, revoked, handed_back, superseded",
        ("model", "class", "end"),
        "attempt",
    ),
    Row("celery_tasks_total", "counter", "tasks that ended, by Celery's state", ("name", "state"), "attempt"),
    _histogram("celery_task_runtime_seconds", "of an attempt", FINE_S, "attempt", "name"),
    _histogram("celery_task_queuetime_seconds", "from submission to the first attempt", FINE_S, "attempt", "name"),
    Row("cellama_telemetry_dropped_total", "counter", "events that the hook did not get in time", (), "worker"),
    Row(
        "cellama_label_values_dropped_total",
        "counter",
        "counts that went to `other`; the gateway tells it, too",
        ("label",),
        "worker",
    ),
)

QUEUES = (
    Row("cellama_up", "gauge", "1: Redis answered", (), "redis"),
    Row("cellama_scrape_truncated", "gauge", "1: there is more than was looked at", (), "redis"),
    Row("celery_queue_length", "gauge", "messages in a queue", ("queue",), "redis"),
    *_of(
        "gauge",
        "redis",
        ("model", "class"),
        ("cellama_jobs_waiting", "jobs without a slot, those that workers hold included"),
        ("cellama_jobs_running", "jobs that have a slot"),
        ("cellama_oldest_waiting_seconds", "how long the oldest job of the class has waited; 0: none waits"),
        ("cellama_queue_eta_seconds", "estimate until a new job gets a slot; absent: nothing is known"),
    ),
    Row("cellama_queue_workers", "gauge", "live workers where the model takes jobs", MODEL, "redis"),
    *_of(
        "gauge",
        "redis",
        (),
        ("cellama_workers", "live workers"),
        ("cellama_worker_age_seconds", "since the oldest heartbeat of a live worker"),
        ("cellama_ledger_leases", "messages that workers hold"),
        ("cellama_ledger_leases_overdue", "of these, whose lease has ended: to be given back to their queues"),
        ("cellama_ledger_leases_overdue_seconds", "how long ago the first of them ended: the reapers' lag"),
        ("cellama_ledger_due", "jobs to be looked at, whose time has come"),
        ("cellama_ledger_due_seconds", "how late the first of them is: the reapers' lag"),
        ("cellama_ledger_missing", "jobs that no queue and no worker seems to have"),
        ("cellama_dead_jobs", "jobs that ended workers again and again"),
        ("cellama_redis_memory_bytes", "what Redis takes"),
        ("cellama_redis_memory_limit_bytes", "what it may take; 0: all that there is"),
    ),
    Row("cellama_bulk_runs", "gauge", "the last 100 bulk runs by state", ("state",), "redis"),
    Row("cellama_bulk_lines", "gauge", "lines of those at work: done, failed, left", ("state",), "redis"),
    *_of(
        "gauge",
        "redis",
        ("tenant",),
        ("cellama_tenant_jobs", "jobs that wait or run, of a tenant's keys in Redis with a limit on jobs"),
        ("cellama_tenant_window_tokens", "tokens charged to a tenant's keys in Redis, in a minute or two"),
    ),
)

GATEWAY = (
    Row("cellama_http_requests_total", "counter", "requests over HTTP", ("route", "method", "status"), "gateway"),
    Row("cellama_http_requests_in_flight", "gauge", "requests that are being answered", (), "gateway"),
    _histogram(
        "cellama_http_first_byte_seconds",
        "from the request to the first byte of a body",
        FINE_S,
        "gateway",
        "route",
    ),
    _histogram("cellama_http_request_seconds", "from the request to the last byte", FINE_S, "gateway", "route"),
    Row(
        "cellama_tenant_tokens_total",
        "counter",
        "tokens of requests whose end it saw, batches left out: prompt, cached, generated",
        ("tenant", "kind"),
        "gateway",
    ),
)

TABLE = {row.name: row for row in (*VLLM, *ENGINES, *ATTEMPTS, *QUEUES, *GATEWAY)}

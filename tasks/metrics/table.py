"""Define all metrics in one table. Tests compare the reference page, the dashboard and the alerts with this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]
Source = Literal["engine", "step", "request", "attempt", "worker", "redis", "gateway"]

# Buckets of vLLM (vllm/v1/metrics/loggers.py), so that its boards can show the metrics of cellama.
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
# Buckets of cellama: from a millisecond to an hour, two or three per decade.
FINE_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    *(1800.0, 3600.0),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A metric with its full name, its help text, its labels, and the part of cellama that counts it."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    source: Source
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram's buckets, except the last, which has none
    field: str = ""  # field of the snapshot that has the value, if any


ENGINE = ("model_name", "engine")  # vLLM's labels
MODEL = ("model",)


def _of(kind: MetricKind, source: Source, labels: tuple[str, ...], *metrics: tuple[str, ...]) -> tuple[Row, ...]:
    """Return a table row for each metric.

    A metric is a tuple of a name, a help text, and optionally a snapshot's field.
    """
    return tuple(Row(name, kind, text, labels, source, field="".join(field)) for name, text, *field in metrics)


def _histogram(name: str, text: str, bounds: tuple[float, ...], source: Source, *labels: str) -> Row:
    return Row(name, "histogram", text, labels, source, bounds)


VLLM = (
    *_of(
        "gauge",
        "engine",
        ENGINE,
        ("vllm:num_requests_running", "Number of requests that have a slot.", "requests_running"),
        (
            "vllm:num_requests_waiting",
            "Number of requests in the worker that are waiting for a slot.",
            "requests_waiting",
        ),
        ("vllm:kv_cache_usage_perc", "Share of the KV cells that running sequences use, from 0 to 1."),
    ),
    Row(
        "vllm:cache_config_info",
        "gauge",
        "Configuration of the KV cache, as labels. The value is 1.",
        (*ENGINE, "num_gpu_blocks", "block_size", "enable_prefix_caching"),
        "engine",
    ),
    *_of(
        "counter",
        "engine",
        ENGINE,
        ("vllm:generation_tokens_total", "Generated tokens, counted while they are generated.", "generated_tokens"),
        ("vllm:num_preemptions_total", "Sequences that lost their slot to a more urgent request.", "preemptions"),
        (
            "vllm:spec_decode_num_drafts_total",
            "Drafts that were checked. A draft consists of consecutive draft tokens for one sequence.",
        ),
        ("vllm:spec_decode_num_draft_tokens_total", "Draft tokens that were checked."),
        ("vllm:spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted."),
    ),
    *_of(
        "counter",
        "request",
        ENGINE,
        ("vllm:prompt_tokens_total", "Prompt tokens of finished requests, including cached tokens."),
        ("vllm:prompt_tokens_cached_total", "Prompt tokens of finished requests that were found in a cache."),
        ("vllm:prefix_cache_queries_total", "Prompt tokens that were looked up in the slots."),
        ("vllm:prefix_cache_hits_total", "Prompt tokens that were found in a slot."),
        (
            "vllm:external_prefix_cache_queries_total",
            "Prompt tokens that were not in a slot, so RAM and disk were searched.",
        ),
        ("vllm:external_prefix_cache_hits_total", "Prompt tokens that were found in RAM or on disk."),
    ),
    Row(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "Number of requests without a slot. The reason is always `capacity`; `deferred` is 0.",
        (*ENGINE, "reason"),
        "engine",
    ),
    Row(
        "vllm:prompt_tokens_by_source_total",
        "counter",
        "Prompt tokens by source: local_compute, local_cache_hit (a slot), external_kv_transfer (RAM or disk).",
        (*ENGINE, "source"),
        "request",
    ),
    Row(
        "vllm:request_success_total",
        "counter",
        "Finished requests by reason: stop, length, abort (cancelled or timed out), error.",
        (*ENGINE, "finished_reason"),
        "request",
    ),
    _histogram(
        "vllm:time_to_first_token_seconds", "Time from submission to the first token.", TTFT_S, "request", *ENGINE
    ),
    _histogram(
        "vllm:inter_token_latency_seconds",
        "Time between two consecutive steps that decode the same sequence.",
        TOKEN_S,
        "step",
        *ENGINE,
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token of a request, after the first token.",
        TOKEN_S,
        "request",
        *ENGINE,
    ),
    _histogram(
        "vllm:e2e_request_latency_seconds",
        "Time from submission to the end of the request.",
        REQUEST_S,
        "request",
        *ENGINE,
    ),
    _histogram(
        "vllm:request_queue_time_seconds",
        "Time from submission until the request got a slot.",
        REQUEST_S,
        "request",
        *ENGINE,
    ),
    _histogram(
        "vllm:request_inference_time_seconds",
        "Time from the assignment of a slot to the end of the request.",
        REQUEST_S,
        "request",
        *ENGINE,
    ),
    _histogram(
        "vllm:request_prefill_time_seconds",
        "Time from the assignment of a slot to the first token.",
        REQUEST_S,
        "request",
        *ENGINE,
    ),
    _histogram(
        "vllm:request_decode_time_seconds",
        "Time from the first token to the end of the request.",
        REQUEST_S,
        "request",
        *ENGINE,
    ),
    _histogram("vllm:iteration_tokens_total", "Number of tokens in the batch of a step.", STEP_TOKENS, "step", *ENGINE),
    _histogram(
        "vllm:request_prompt_tokens", "Number of prompt tokens of a request.", REQUEST_TOKENS, "request", *ENGINE
    ),
    _histogram(
        "vllm:request_generation_tokens",
        "Number of generated tokens of a request, in all its completions.",
        REQUEST_TOKENS,
        "request",
        *ENGINE,
    ),
    _histogram("vllm:request_params_n", "Number of completions per request.", COMPLETIONS, "request", *ENGINE),
)

ENGINES = (
    *_of(
        "gauge",
        "engine",
        MODEL,
        ("cellama_slots", "Number of slots.", "slots_total"),
        ("cellama_slots_prefilling", "Number of slots that are prefilling a prompt.", "slots_prefilling"),
        ("cellama_slots_decoding", "Number of slots that are generating tokens.", "slots_decoding"),
        ("cellama_kv_cells_used", "KV cells of running sequences.", "kv_used_tokens"),
        (
            "cellama_kv_cells_cached",
            "KV cells that idle slots keep for later requests with the same prefix.",
            "kv_cached_tokens",
        ),
        ("cellama_kv_cells", "Number of KV cells.", "kv_total_tokens"),
        ("cellama_ram_states", "Number of KV states in RAM.", "ram_states"),
        ("cellama_ram_bytes", "Memory of the KV states in RAM, in bytes.", "ram_used_bytes"),
        (
            "cellama_disk_bytes",
            "Size of all KV states in cache_dir, in bytes, including the KV states of other processes.",
            "disk_used_bytes",
        ),
        ("cellama_disk_quota_bytes", "Disk quota for cache_dir in bytes.", "disk_quota_bytes"),
        (
            "cellama_prompt_tokens_per_second",
            "Prompt tokens computed per second, over the last second of work.",
            "prompt_rate",
        ),
        (
            "cellama_generated_tokens_per_second",
            "Tokens generated per second, over the last second of work.",
            "generation_rate",
        ),
        ("cellama_model_up", "1 while the model's thread is running, 0 if it has died."),
        ("cellama_model_bytes", "Memory of the model on all devices, in bytes."),
    ),
    *_of(
        "counter",
        "engine",
        MODEL,
        ("cellama_steps_total", "Engine steps.", "steps"),
        ("cellama_mixed_steps_total", "Steps with both prefill and decode tokens.", "mixed_steps"),
        (
            "cellama_batch_strategy_failures_total",
            "Steps in which the batch strategy failed and another strategy replaced it.",
            "strategy_failures",
        ),
        ("cellama_ram_saves_total", "KV states saved in RAM.", "ram_saves"),
        ("cellama_ram_evictions_total", "KV states removed from RAM because of the quota.", "ram_evictions"),
        ("cellama_disk_loads_total", "KV states read from disk.", "disk_loads"),
        (
            "cellama_disk_late_total",
            "KV states that were read from disk too late, after they had been recomputed.",
            "disk_late",
        ),
        ("cellama_disk_misses_total", "Files of KV states that were damaged, unusable or missing.", "disk_misses"),
        ("cellama_disk_saves_total", "KV states written to disk.", "disk_saves"),
        ("cellama_disk_drops_total", "KV states that were not written to disk.", "disk_drops"),
        ("cellama_disk_evictions_total", "Files of KV states removed because of the quota.", "disk_evictions"),
        ("cellama_disk_read_bytes_total", "Bytes read from cache_dir.", "disk_read_bytes"),
        ("cellama_disk_written_bytes_total", "Bytes written to cache_dir.", "disk_written_bytes"),
        ("cellama_requests_failed_total", "Requests that failed.", "requests_failed"),
    ),
    Row(
        "cellama_prefix_lookups_total",
        "counter",
        "Requests that got a slot, by the place where their prefix was found: slot, copy (another slot), ram, disk "
        "or miss.",
        ("model", "tier"),
        "engine",
    ),
    Row(
        "cellama_draft_tokens_total",
        "counter",
        "Draft tokens, by source and by whether they were accepted.",
        ("model", "source", "accepted"),
        "engine",
    ),
    *_of(
        "gauge",
        "engine",
        ("model", "part"),
        ("cellama_texts_waiting", "Texts that an embedder or reranker has not computed yet.", "texts_waiting"),
    ),
    *_of(
        "counter",
        "engine",
        ("model", "part"),
        ("cellama_texts_total", "Texts that were embedded or ranked.", "texts"),
        ("cellama_text_tokens_total", "Tokens of texts that were embedded or ranked.", "prompt_tokens"),
        ("cellama_text_requests_total", "Embedding and ranking requests that succeeded.", "requests_finished"),
        ("cellama_text_requests_failed_total", "Embedding and ranking requests that failed.", "requests_failed"),
    ),
    Row(
        "cellama_requests_total",
        "counter",
        "Finished requests by cellama's finish reason.",
        ("model", "finish_reason"),
        "request",
    ),
    _histogram("cellama_first_token_seconds", "Time from submission to the first token.", FINE_S, "request", "model"),
    _histogram(
        "cellama_token_gap_seconds",
        "Time between two consecutive steps that decode the same sequence.",
        FINE_S,
        "step",
        "model",
    ),
    _histogram(
        "cellama_prefix_wait_seconds",
        "Time that a request waited while another request computed their common prefix.",
        FINE_S,
        "request",
        "model",
    ),
)

ATTEMPTS = (
    Row(
        "cellama_attempts_total",
        "counter",
        "Attempts that started, by whether they were their job's first attempt.",
        ("model", "class", "first"),
        "attempt",
    ),
    Row(
        "cellama_attempt_ends_total",
        "counter",
        "Attempts that ended, by outcome: success, failure, revoked, handed_back or superseded.",
        ("model", "class", "end"),
        "attempt",
    ),
    Row("celery_tasks_total", "counter", "Finished tasks by their state in Celery.", ("name", "state"), "attempt"),
    _histogram("celery_task_runtime_seconds", "Duration of an attempt.", FINE_S, "attempt", "name"),
    _histogram(
        "celery_task_queuetime_seconds", "Time from submission to the first attempt.", FINE_S, "attempt", "name"
    ),
    Row(
        "cellama_telemetry_dropped_total",
        "counter",
        "Events that were dropped because the hooks were too slow.",
        (),
        "worker",
    ),
    _histogram("cellama_model_load_seconds", "Duration of each model load.", FINE_S, "worker", "model"),
    Row(
        "cellama_label_values_dropped_total",
        "counter",
        "Counts that were added to `other` because a label has too many values. The gateway also reports this metric.",
        ("label",),
        "worker",
    ),
)

QUEUES = (
    Row("cellama_up", "gauge", "1 if Redis answers.", (), "redis"),
    Row(
        "cellama_scrape_truncated",
        "gauge",
        "1 if there are more queues, bulk runs or keys than one scrape reads.",
        (),
        "redis",
    ),
    Row("celery_queue_length", "gauge", "Number of messages in a queue.", ("queue",), "redis"),
    *_of(
        "gauge",
        "redis",
        ("model", "class"),
        ("cellama_jobs_waiting", "Number of jobs without a slot, including jobs that workers hold."),
        ("cellama_jobs_running", "Number of jobs that have a slot."),
        (
            "cellama_oldest_waiting_seconds",
            "Time that the oldest job of the class has been waiting. 0 if no job is waiting.",
        ),
        (
            "cellama_queue_eta_seconds",
            "Estimated time until a new job gets a slot. Absent if no estimate is possible.",
        ),
    ),
    *_of(
        "gauge",
        "redis",
        ("pool",),
        (
            "cellama_wanted_workers",
            "Number of workers that the pool needs, as computed by `cellama autoscale`.",
        ),
        ("cellama_pool_workers", "Number of running workers in the pool."),
        (
            "cellama_pool_backlog_seconds",
            "Estimated time in which one worker could finish the pool's jobs. Absent if no estimate is possible.",
        ),
    ),
    Row("cellama_queue_workers", "gauge", "Number of running workers that accept jobs for the model.", MODEL, "redis"),
    *_of(
        "gauge",
        "redis",
        (),
        ("cellama_workers", "Number of running workers."),
        ("cellama_worker_age_seconds", "Age of the oldest heartbeat of a running worker."),
        ("cellama_ledger_leases", "Number of messages that workers hold."),
        (
            "cellama_ledger_leases_overdue",
            "Number of messages whose lease has expired, but which are not back in their queue yet.",
        ),
        (
            "cellama_ledger_leases_overdue_seconds",
            "Time since the first overdue lease expired. It shows how far behind the reapers are.",
        ),
        ("cellama_ledger_due", "Number of jobs that the reapers must check now."),
        (
            "cellama_ledger_due_seconds",
            "Time since the first due job became due. It shows how far behind the reapers are.",
        ),
        ("cellama_ledger_missing", "Number of jobs that seem to be neither in a queue nor on a worker."),
        ("cellama_dead_jobs", "Number of dead-letter jobs, which crashed several workers."),
        ("cellama_redis_memory_bytes", "Memory used by Redis, in bytes."),
        ("cellama_redis_memory_limit_bytes", "Memory limit of Redis in bytes, or 0 if there is no limit."),
    ),
    Row(
        "cellama_bulk_runs",
        "gauge",
        "Number of bulk runs by state, among the 100 most recently active runs.",
        ("state",),
        "redis",
    ),
    Row(
        "cellama_bulk_lines",
        "gauge",
        "Number of lines in active bulk runs, by state: done, failed or left.",
        ("state",),
        "redis",
    ),
    *_of(
        "gauge",
        "redis",
        ("tenant",),
        ("cellama_tenant_jobs", "Number of waiting and running jobs for keys that limit concurrent jobs."),
        (
            "cellama_tenant_window_tokens",
            "Number of tokens charged to the tenant's keys in the last one to two minutes.",
        ),
        (
            "cellama_tenant_waiting_jobs",
            "Number of waiting jobs with a fairness key. The 20 keys with the most service have their own values.",
        ),
        ("cellama_tenant_running_jobs", "Number of running jobs with a fairness key."),
        (
            "cellama_tenant_service_tokens",
            "Service that a fairness key received in the last hour, in tokens as counted for fair shares.",
        ),
    ),
)

GATEWAY = (
    Row("cellama_http_requests_total", "counter", "HTTP requests.", ("route", "method", "status"), "gateway"),
    Row("cellama_http_requests_in_flight", "gauge", "Number of HTTP requests in progress.", (), "gateway"),
    _histogram(
        "cellama_http_first_byte_seconds",
        "Time from the request to the first byte of the response body.",
        FINE_S,
        "gateway",
        "route",
    ),
    _histogram(
        "cellama_http_request_seconds",
        "Time from the request to the last byte of the response.",
        FINE_S,
        "gateway",
        "route",
    ),
    Row(
        "cellama_tenant_tokens_total",
        "counter",
        "Tokens of requests that finished in this gateway, excluding batches: prompt, cached or generated.",
        ("tenant", "kind"),
        "gateway",
    ),
)

TABLE = {row.name: row for row in (*VLLM, *ENGINES, *ATTEMPTS, *QUEUES, *GATEWAY)}

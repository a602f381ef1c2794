"""Count the metrics of a worker, and serve them to Prometheus (docs/adr/023-metrics.md).

Attempts and requests are counted when they end. The counts of engines, embedders and rerankers are read from their
snapshots at each scrape, which doesn't delay the engines.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from cellama.engine import (
    Completion,
    EmbedderSnapshot,
    Engine,
    EngineSnapshot,
    Finished,
    InvalidRequest,
    Model,
    StepCounts,
)
from cellama.tasks.contract.names import class_of_priority, model_of
from cellama.tasks.metrics.exposition import MetricsServer
from cellama.tasks.metrics.figures import Bounded, Figures, Meter
from cellama.tasks.metrics.table import ENGINE as VLLM_LABELS, FINE_S, STEP_TOKENS, TABLE, TOKEN_S, Row
from cellama.tasks.middleware import AttemptContext, Middleware

from .telemetry import TelemetryRelay

CELERY_STATES = {"success": "SUCCESS", "failure": "FAILURE", "revoked": "REVOKED"}  # by attempt.end
VLLM_REASONS = {"cancelled": "abort", "timeout": "abort"}  # vLLM only has stop, length, abort and error
ENGINE = "0"  # vLLM's index of the only engine of a model
SNAPSHOT_ROWS = [row for row in TABLE.values() if row.field]
ENGINE_ROWS = [row for row in SNAPSHOT_ROWS if "part" not in row.labels]
TEXT_ROWS = [row for row in SNAPSHOT_ROWS if "part" in row.labels]
TIERS = ("slot", "copy", "ram", "disk")
GAPS_S = tuple(sorted({*TOKEN_S, *FINE_S}))  # bucket bounds of both histograms of gaps, in seconds
LoadedModels = Callable[[], Mapping[str, Model]]


class Metrics(Middleware):
    """Counts the metrics of one worker, and serves them on a port."""

    def __init__(self, host: str, port: int, relay: TelemetryRelay, models: LoadedModels) -> None:
        """Start serving the metrics. Raises InvalidRequest if the port is not available."""
        self._relay = relay
        self._loaded_models = models
        self._meter = Meter()
        self._models = Bounded()  # values of the label `model`; names of tasks are few
        self._steps: dict[str, StepCounts] = {}  # by model id: counts of its current or last engine
        try:
            self._server = MetricsServer(host, port, self.figures)
        except OSError as error:
            raise InvalidRequest(
                f"metrics_port: {port} on metrics_host {host!r} is not available ({error}); "
                "choose a different port for each worker on a machine"
            ) from None

    @property
    def port(self) -> int:
        return self._server.port

    def close(self) -> None:
        self._server.close()

    def figures(self) -> Figures:
        """Return the current values of all metrics. Thread-safe."""
        figures = Figures()
        self._meter.add_to(figures)
        for model_id, model in self._loaded_models().items():  # figures of unloaded models are not reported
            _add_model(figures, self._models.of(model_id), model, self._steps.get(model_id))
        figures.add("cellama_telemetry_dropped_total", self._relay.num_dropped)
        figures.add("cellama_label_values_dropped_total", self._models.num_dropped, "model")
        return figures

    def on_model_loaded(self, model_id: str, model: Model) -> None:
        self._meter.observe("cellama_model_load_seconds", model.load_s, self._models.of(model_id))
        if {"generate", "chat"} & model.capabilities:
            self.count_steps(model_id, model.engine)

    def count_steps(self, model_id: str, engine: Engine) -> None:
        """Start counting the steps of this engine, on the engine's thread."""
        self._steps[model_id] = counts = StepCounts(GAPS_S, STEP_TOKENS)
        engine.count_steps(counts)

    # Attempts

    def _labels_of(self, attempt: AttemptContext) -> tuple[str, str]:
        return self._models.of(model_of(attempt.queue)), class_of_priority(attempt.priority)

    def before_attempt(self, attempt: AttemptContext) -> None:
        is_first = attempt.number == 1
        self._meter.count("cellama_attempts_total", *self._labels_of(attempt), "true" if is_first else "false")
        if is_first:
            self._meter.observe("celery_task_queuetime_seconds", attempt.record.waited_s, attempt.task)

    def after_attempt(self, attempt: AttemptContext) -> None:
        end = str(attempt.end)
        self._meter.observe("celery_task_runtime_seconds", time.monotonic() - attempt.began_at, attempt.task)
        self._meter.count("cellama_attempt_ends_total", *self._labels_of(attempt), end)
        if (state := CELERY_STATES.get(end)) is not None:
            self._meter.count("celery_tasks_total", attempt.task, state)

    # Requests

    def after_request(self, model_id: str, end: Finished, attempt: AttemptContext | None) -> None:
        model, completion = self._models.of(model_id), end.completion
        reason = "error" if completion is None else completion.finish_reason
        self._meter.count("cellama_requests_total", model, reason)
        self._meter.count("vllm:request_success_total", model, ENGINE, VLLM_REASONS.get(reason, reason))
        if completion is not None:
            self._observe_times(model, completion)
            self._count_tokens(model, completion)

    def _observe_times(self, model: str, completion: Completion) -> None:
        timings, observe = completion.timings, self._meter.observe
        queue_s = timings.queue_ms / 1e3
        whole_s = max(part.timings.duration_ms for part in (completion, *completion.alternatives)) / 1e3
        observe("vllm:e2e_request_latency_seconds", whole_s, model, ENGINE)
        observe("vllm:request_queue_time_seconds", queue_s, model, ENGINE)
        if timings.prefix_wait_ms:
            observe("cellama_prefix_wait_seconds", timings.prefix_wait_ms / 1e3, model)
        if completion.slot is None:
            return  # the request ended before it got a slot
        observe("vllm:request_inference_time_seconds", whole_s - queue_s, model, ENGINE)
        if timings.ttft_ms is None:
            return
        first_s = timings.ttft_ms / 1e3
        observe("vllm:time_to_first_token_seconds", first_s, model, ENGINE)
        observe("cellama_first_token_seconds", first_s, model)
        observe("vllm:request_prefill_time_seconds", first_s - queue_s, model, ENGINE)
        observe("vllm:request_decode_time_seconds", whole_s - first_s, model, ENGINE)
        if timings.generation_rate:
            observe("vllm:request_time_per_output_token_seconds", 1 / timings.generation_rate, model, ENGINE)

    def _count_tokens(self, model: str, completion: Completion) -> None:
        usage, labels = completion.usage, (model, ENGINE)
        in_slot = usage.cached_tokens if usage.cache_tier == "device" else 0
        counted = {
            "vllm:prompt_tokens_total": usage.prompt_tokens,
            "vllm:prompt_tokens_cached_total": usage.cached_tokens,
            "vllm:prefix_cache_queries_total": usage.prompt_tokens,
            "vllm:prefix_cache_hits_total": in_slot,
            "vllm:external_prefix_cache_queries_total": usage.prompt_tokens - in_slot,
            "vllm:external_prefix_cache_hits_total": usage.cached_tokens - in_slot,
        }
        for name, number in counted.items():
            self._meter.count(name, *labels, by=number)
        sources = {
            "local_compute": usage.prompt_tokens - usage.cached_tokens,
            "local_cache_hit": in_slot,
            "external_kv_transfer": usage.cached_tokens - in_slot,
        }
        for source, number in sources.items():
            self._meter.count("vllm:prompt_tokens_by_source_total", *labels, source, by=number)
        self._meter.observe("vllm:request_prompt_tokens", usage.prompt_tokens, *labels)
        self._meter.observe("vllm:request_generation_tokens", usage.completion_tokens, *labels)
        self._meter.observe("vllm:request_params_n", 1 + len(completion.alternatives), *labels)


def _add_model(figures: Figures, name: str, model: Model, counts: StepCounts | None) -> None:
    snapshot = model.snapshot()
    if snapshot.engine is not None:
        _add_rows(figures, ENGINE_ROWS, snapshot.engine, name)
        _add_engine(figures, name, snapshot.engine)
        if counts is not None:
            _add_steps(figures, name, counts)
    for part, part_snapshot in (("embedder", snapshot.embedder), ("reranker", snapshot.reranker)):
        if part_snapshot is not None:
            _add_rows(figures, TEXT_ROWS, part_snapshot, name, part)
    figures.add("cellama_model_up", float(snapshot.phase != "stopped"), name)
    figures.add("cellama_model_bytes", model.memory.total_bytes, name)


def _add_rows(figures: Figures, rows: list[Row], snapshot: EngineSnapshot | EmbedderSnapshot, *labels: str) -> None:
    for row in rows:
        row_labels = (labels[0], ENGINE) if row.labels == VLLM_LABELS else labels
        figures.add(row.name, getattr(snapshot, row.field), *row_labels)


def _add_engine(figures: Figures, name: str, engine: EngineSnapshot) -> None:
    for tier in TIERS:
        figures.add("cellama_prefix_lookups_total", getattr(engine, f"cache_hits_{tier}"), name, tier)
    figures.add("cellama_prefix_lookups_total", engine.cache_misses, name, "miss")
    drafts = drafted = accepted = 0
    for source, count in dict(engine.drafts).items():
        figures.add("cellama_draft_tokens_total", count.accepted, name, source, "true")
        figures.add("cellama_draft_tokens_total", count.drafted - count.accepted, name, source, "false")
        drafts, drafted, accepted = drafts + count.drafts, drafted + count.drafted, accepted + count.accepted
    figures.add("vllm:spec_decode_num_drafts_total", drafts, name, ENGINE)
    figures.add("vllm:spec_decode_num_draft_tokens_total", drafted, name, ENGINE)
    figures.add("vllm:spec_decode_num_accepted_tokens_total", accepted, name, ENGINE)
    for reason, number in (("capacity", engine.requests_waiting), ("deferred", 0)):
        figures.add("vllm:num_requests_waiting_by_reason", number, name, ENGINE, reason)
    used = engine.kv_used_tokens / engine.kv_total_tokens if engine.kv_total_tokens else 0.0
    figures.add("vllm:kv_cache_usage_perc", used, name, ENGINE)
    figures.add("vllm:cache_config_info", 1, name, ENGINE, str(engine.kv_total_tokens), "1", "True")


def _add_steps(figures: Figures, name: str, counts: StepCounts) -> None:
    gaps, gaps_s = list(counts.gaps), counts.gaps_s
    for metric, *labels in (("vllm:inter_token_latency_seconds", name, ENGINE), ("cellama_token_gap_seconds", name)):
        figures.tally(metric, *labels).add(_rebucketed(gaps, TABLE[metric].bounds), gaps_s)
    figures.tally("vllm:iteration_tokens_total", name, ENGINE).add(list(counts.batches), counts.tokens)


def _rebucketed(gaps: Sequence[int], bounds: Sequence[float]) -> list[int]:
    """Merge the counts of the buckets in GAPS_S into a histogram whose bounds are a subset of GAPS_S."""
    counts = [0] * (len(bounds) + 1)
    for bound, count in zip((*GAPS_S, math.inf), gaps, strict=True):
        counts[bisect_left(bounds, bound)] += count
    return counts

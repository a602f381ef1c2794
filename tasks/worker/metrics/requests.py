"""Requests that end, from what their results say. Publisher's thread only."""

from __future__ import annotations

from cellama.engine import Completion, Event, Finished
from cellama.tasks.metrics.bounded import Bounded
from cellama.tasks.metrics.meter import Meter

VLLM_REASONS = {"cancelled": "abort", "timeout": "abort"}  # vLLM knows stop, length, abort, error
ENGINE = "0"  # vLLM's index of an engine of one model


class Requests:
    """Called with each event of an engine. It is in the way of all events: nothing in it can fail."""

    def __init__(self, meter: Meter, models: Bounded) -> None:
        self._meter = meter
        self._models = models

    def __call__(self, model_id: str, event: Event) -> None:
        if not isinstance(event, Finished):
            return
        model, completion = self._models.of(model_id), event.completion
        reason = "error" if completion is None else completion.finish_reason
        self._meter.count("cellama_requests_total", model, reason)
        self._meter.count("vllm:request_success_total", model, ENGINE, VLLM_REASONS.get(reason, reason))
        if completion is not None:
            self._times(model, completion)
            self._tokens(model, completion)

    def _times(self, model: str, completion: Completion) -> None:
        timings, observe = completion.timings, self._meter.observe
        queue_s = timings.queue_ms / 1e3
        whole_s = max(part.timings.duration_ms for part in (completion, *completion.alternatives)) / 1e3
        observe("vllm:e2e_request_latency_seconds", whole_s, model, ENGINE)
        observe("vllm:request_queue_time_seconds", queue_s, model, ENGINE)
        if timings.prefix_wait_ms:
            observe("cellama_prefix_wait_seconds", timings.prefix_wait_ms / 1e3, model)
        if completion.slot is None:
            return  # it ended without one
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

    def _tokens(self, model: str, completion: Completion) -> None:
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

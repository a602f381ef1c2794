"""The metrics of a worker have the values that its load implies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from cellama.engine import Completion, DecodeFailed, Finished, InvalidRequest, Timings, Usage
from cellama.tasks.broker.pool import Interruption
from cellama.tasks.metrics.exposition import text_of
from cellama.tasks.metrics.figures import Figures
from cellama.tasks.worker.metrics import Metrics
from cellama.tasks.worker.telemetry import TelemetryRelay

from ....prometheus_text import sample
from ...conftest import MakeEngine, request
from ..attempt_contexts import context, running

PATIENCE_S = 30


def value(figures: Figures, metric: str, /, **labels: str) -> float | None:
    return sample(text_of(figures).decode(), metric, **labels)


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    """Return the metrics of a worker without models."""
    made = Metrics("127.0.0.1", 0, TelemetryRelay("w"), dict)
    yield made
    made.close()


def finished(reason: Any, cached: int = 0, tier: Any = None, slot: int | None = 0) -> Finished:
    timings = Timings(100.0, 300.0, 1300.0, 500.0, 20.0)
    usage = Usage(40, 21, cached, tier)
    return Finished("a#1", Completion("x", (1,), reason, None, usage, timings, slot, 7))


def test_requests_are_counted_by_finish_reason_and_bucket(metrics: Metrics) -> None:
    for event in (finished("stop", 30, "device"), finished("timeout", 10, "ram"), finished("cancelled", slot=None)):
        metrics.after_request("m", event, None)
    metrics.after_request("m", Finished("b#1", error=DecodeFailed("no")), None)
    figures, m = metrics.figures(), {"model_name": "m"}
    assert value(figures, "vllm:request_success_total", finished_reason="stop", **m) == 1
    assert value(figures, "vllm:request_success_total", finished_reason="abort", **m) == 2
    assert value(figures, "cellama_requests_total", model="m", finish_reason="error") == 1
    assert value(figures, "vllm:prompt_tokens_total", **m) == 120
    assert value(figures, "vllm:prefix_cache_hits_total", **m) == 30
    assert value(figures, "vllm:external_prefix_cache_hits_total", **m) == 10
    assert value(figures, "vllm:external_prefix_cache_queries_total", **m) == 90
    sources = {"local_compute": 80, "local_cache_hit": 30, "external_kv_transfer": 10}
    for source, tokens in sources.items():
        assert value(figures, "vllm:prompt_tokens_by_source_total", source=source, **m) == tokens
    assert value(figures, "vllm:time_to_first_token_seconds_sum", **m) == pytest.approx(0.6)
    assert value(figures, "vllm:request_prefill_time_seconds_sum", **m) == pytest.approx(0.4)
    assert value(figures, "vllm:request_decode_time_seconds_sum", **m) == pytest.approx(2.0)
    assert value(figures, "vllm:request_time_per_output_token_seconds_sum", **m) == pytest.approx(0.1)
    assert value(figures, "vllm:e2e_request_latency_seconds_count", **m) == 3


def test_request_duration_extends_to_the_last_of_several_completions(metrics: Metrics) -> None:
    event = finished("stop")
    assert event.completion is not None
    later = replace(event.completion, index=1, timings=replace(event.completion.timings, duration_ms=2300.0))
    metrics.after_request("m", replace(event, completion=replace(event.completion, alternatives=(later,))), None)
    figures = metrics.figures()
    assert value(figures, "vllm:e2e_request_latency_seconds_sum", model_name="m") == pytest.approx(2.3)
    assert value(figures, "vllm:request_params_n_sum", model_name="m") == 2


def test_engine_counts_a_gap_for_each_token_except_the_first(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    loaded: dict[str, Any] = {}
    metrics = Metrics("127.0.0.1", 0, TelemetryRelay("w"), lambda: loaded)
    metrics.count_steps("m", engine)
    handles = [engine.submit(request(letter, letter, max_tokens=9)) for letter in "abc"]
    usages = [handle.result(PATIENCE_S).usage for handle in handles]
    assert engine.close()
    snapshot = SimpleNamespace(engine=engine.snapshot(), embedder=None, reranker=None, phase="idle")
    loaded["m"] = SimpleNamespace(memory=SimpleNamespace(total_bytes=5), snapshot=lambda: snapshot)
    figures = metrics.figures()
    metrics.close()
    generated = sum(usage.completion_tokens for usage in usages)
    assert value(figures, "vllm:generation_tokens_total", model_name="m") == generated
    gaps = generated - len(usages)
    assert value(figures, "vllm:inter_token_latency_seconds_count", model_name="m") == gaps
    assert value(figures, "cellama_token_gap_seconds_count", model="m") == gaps
    assert value(figures, "vllm:iteration_tokens_total_count", model_name="m") == engine.snapshot().steps


@pytest.mark.parametrize(
    ("error", "interruption", "end"),
    [
        (None, None, "success"),
        (RuntimeError(), None, "failure"),
        (Ignore(), Interruption.CANCELLED, "revoked"),
        (Reject(), Interruption.HANDED_BACK, "handed_back"),
        (Ignore(), Interruption.SUPERSEDED, "superseded"),
        (Ignore(), None, "superseded"),
        (Ignore(), Interruption.HARD_LIMIT, "failure"),
        (SoftTimeLimitExceeded(), Interruption.SOFT_LIMIT, "failure"),
    ],
)
def test_attempts_are_counted_by_their_outcome(metrics: Metrics, error: Any, interruption: Any, end: str) -> None:
    with running(metrics, context(queue="cellama:queue:m", priority=9), interruption):
        if error is not None:
            raise error
    figures, labels = metrics.figures(), {"model": "m", "class": "bulk"}
    assert value(figures, "cellama_attempts_total", first="true", **labels) == 1
    assert value(figures, "cellama_attempt_ends_total", end=end, **labels) == 1
    assert value(figures, "celery_task_queuetime_seconds_sum", name="cellama.generate") == 2.0


def test_metrics_server_rejects_a_port_that_is_not_available(metrics: Metrics) -> None:
    relay = TelemetryRelay("w")
    relay.num_dropped = 3
    other = Metrics("127.0.0.1", 0, relay, dict)
    assert value(other.figures(), "cellama_telemetry_dropped_total") == 3
    other.close()
    with pytest.raises(InvalidRequest, match=f"metrics_port: {metrics.port} .*a different port"):
        Metrics("127.0.0.1", metrics.port, relay, dict)

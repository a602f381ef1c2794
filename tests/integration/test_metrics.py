"""A real Prometheus scrapes two workers, a gateway and `cellama metrics`, and each figure matches the load."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cellama.api.machine.redis_server import RedisServer, die_with, free_port
from cellama.tasks import generate
from cellama.tasks.metrics.table import TABLE

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment, wait_until
from ..gateways import GatewayProcess
from ..prometheus import Prometheus
from ..unit.test_board import EXPRESSIONS, OVERVIEW

DASHBOARDS = Path(__file__).parents[2] / "docs" / "dashboards"
METRICS = [sys.executable, "-c", "from cellama.api.cli import main; main()", "metrics", "--port"]
NUM_JOBS, MAX_TOKENS, NUM_WORKERS = 12, 9, 2
SCRAPE_S = 2  # a longer scrape fails
Scraped = tuple[Prometheus, GatewayProcess, str]
Load = tuple[list[Any], dict[str, Any]]


@pytest.fixture(scope="module")
def scraped(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Return Prometheus, the gateway that it scrapes, and the name of a model that the scraped workers serve."""
    name, folder, started = f"t{uuid.uuid4().hex[:8]}", tmp_path_factory.mktemp("metrics"), contextlib.ExitStack()
    settings = {"id": name, "source": "bundled://tiny", "n_parallel": 4, "threads": 1, "speculation": "off"}
    ports = {"workers": [free_port() for _ in range(NUM_WORKERS)], "queues": [free_port()]}
    environment = clean_environment(CELLAMA_REDIS_URL=redis_server.url)
    with started:
        workers = []
        for port in ports["workers"]:
            told = {"CELLAMA_MODELS": json.dumps([settings]), "CELLAMA_METRICS_PORT": str(port)}
            own = tmp_path_factory.mktemp("worker")
            workers.append(WorkerProcess(own, redis_server.url, name=f"{name}-{port}", **told))
            started.callback(workers[-1].stop)
        gateway = GatewayProcess(folder, redis_server.url)
        started.callback(gateway.stop)
        queues = subprocess.Popen(
            [*METRICS, str(ports["queues"][0])], env=environment, preexec_fn=die_with(os.getpid())
        )
        started.callback(end, queues)
        prometheus = Prometheus(folder, {**ports, "gateway": [gateway.port]}, SCRAPE_S)
        started.callback(prometheus.close)
        for ready in (*workers, gateway):
            ready.wait_ready()
        wait_until(lambda: prometheus.is_up(NUM_WORKERS + 2), "all targets that are up")
        yield prometheus, gateway, name


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def load(scraped: Scraped) -> Load:
    """Run all jobs of this module and a request to the gateway, and return their results."""
    _, gateway, name = scraped
    jobs = [generate.delay(name, f"{number} Once upon a time", max_tokens=MAX_TOKENS) for number in range(NUM_JOBS)]
    results = [job.get(timeout=PATIENCE_S) for job in jobs]
    body = {"model": name, "prompt": "There was", "max_tokens": MAX_TOKENS}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200
    return results, answer.json()


def test_metrics_match_the_load(scraped: Scraped, load: Load) -> None:
    prometheus, _, name = scraped
    results, answer = load
    asked = answer["usage"]
    usages = [*(result["usage"] for result in results), asked]
    cached = [result["usage"]["cached_tokens"] for result in results]
    cached.append(asked["prompt_tokens_details"]["cached_tokens"])
    generated = [usage["completion_tokens"] for usage in usages]
    reasons = Counter([*(result["finish_reason"] for result in results), answer["choices"][0]["finish_reason"]])
    of, own = f'{{model_name="{name}"}}', f'model="{name}"'
    expected = {
        f"vllm:prompt_tokens_total{of}": sum(usage["prompt_tokens"] for usage in usages),
        f"vllm:prompt_tokens_cached_total{of}": sum(cached),
        f"vllm:generation_tokens_total{of}": sum(generated),
        f"vllm:request_generation_tokens_sum{of}": sum(generated),
        f"vllm:time_to_first_token_seconds_count{of}": len(usages),
        f"vllm:inter_token_latency_seconds_count{of}": sum(max(0, number - 1) for number in generated),
        **{f'cellama_requests_total{{{own},finish_reason="{reason}"}}': number for reason, number in reasons.items()},
        f'cellama_attempts_total{{{own},first="true",class="interactive"}}': len(usages),
        'celery_tasks_total{name="cellama.generate",state="SUCCESS"}': len(usages),
        'cellama_http_requests_total{route="/v1/completions",status="200"}': 1,
        'cellama_tenant_tokens_total{kind="generated"}': asked["completion_tokens"],
        f"cellama_queue_workers{{{own}}}": NUM_WORKERS,
    }

    others: dict[str, float | None] = {}

    def is_told() -> bool:
        told = {metric: prometheus.value(f"sum({metric})") for metric in expected}
        others.clear()
        others.update((metric, value) for metric, value in told.items() if value != expected[metric])
        return not others

    with contextlib.suppress(pytest.fail.Exception):
        wait_until(is_told, "all figures")
    assert others == {}
    first_s = sum(result["timings"]["ttft_ms"] for result in results) / 1e3
    query = f"sum(vllm:time_to_first_token_seconds_sum{of})"
    # Includes the job of the gateway's request. A scrape may have failed just now.
    wait_until(lambda: (prometheus.value(query) or 0.0) >= first_s * 0.999, "the time of first tokens")


@pytest.mark.usefixtures("load")
def test_prometheus_accepts_dashboard_queries_and_alerts(scraped: Scraped) -> None:
    prometheus, _, _ = scraped
    for expression in EXPRESSIONS:
        prometheus.query(expression.replace("$__rate_interval", "1m").replace("$model", ".*"))
    told = {name: f"{name}_count" if TABLE[name].kind == "histogram" else name for name in OVERVIEW}
    wait_until(lambda: all(prometheus.query(name) for name in told.values()), "all metrics on vLLM's dashboard")
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "--syntax-only", "prometheus.yml")


def promtool(*argv: str) -> None:
    ended = subprocess.run(["promtool", *argv], cwd=DASHBOARDS, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def check_alert(folder: Path, alert: str, series: dict[str, str], at: str, *, fires: bool) -> None:
    """Check with promtool whether the alert fires at this time, if values arrive every 5 s."""
    fired = f'ALERTS{{alertname="{alert}", alertstate="firing", severity="warn"}}'
    told = {"expr": fired, "eval_time": at, "exp_samples": [{"labels": fired, "value": 1}] if fires else []}
    given = [{"series": name, "values": values} for name, values in series.items()]
    tests = [{"interval": "5s", "input_series": given, "promql_expr_test": [told]}]
    rules = {"rule_files": [str(DASHBOARDS / "alerts.yml")], "evaluation_interval": "15s", "tests": tests}
    (folder / "tests.yml").write_text(yaml.safe_dump(rules))
    promtool("test", "rules", str(folder / "tests.yml"))


def test_worker_that_dies_between_two_scrapes_is_reported(tmp_path: Path) -> None:
    series = {"cellama_worker_age_seconds": "1.5 0.5 6 stale _x4"}
    check_alert(tmp_path, "CellamaWorkerSilent", series, "30s", fires=True)


@pytest.mark.parametrize(
    ("late_s", "fires"), [("1x60", False), ("61+5x60", True)], ids=["with a reaper", "without a reaper"]
)
def test_expired_leases_are_reported_only_when_there_is_no_reaper(tmp_path: Path, late_s: str, fires: bool) -> None:
    """Because of jobs with an ETA, there is always a lease that has just expired."""
    series = {"cellama_ledger_leases_overdue": "3x60", "cellama_ledger_leases_overdue_seconds": late_s}
    series["cellama_ledger_due_seconds"] = "0x60"
    check_alert(tmp_path, "CellamaReapersLag", series, "4m", fires=fires)

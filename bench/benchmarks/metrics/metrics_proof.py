"""What a Prometheus has of two workers, a gateway and `cellama metrics` under a mixed load, against the load's client.

What is counted must be what the client counts, to the last token. Times must be within a tenth of those by its clock,
which begins before it asks and ends when it has read the token or the end: what lies between it and a worker is in the
ratio. Each expression of the board that ships must have data or be told below why it has none, the alerts must have
been evaluated, and with --overview each panel of vLLM's overview board, too (`vllm_overview.json`, in
examples/observability/dashboards/grafana of its repository). Fails if anything is otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

from cellama.api import Client
from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, wait_until
from cellama.bench.peers.programs import served
from cellama.bench.peers.prometheus import Prometheus
from cellama.engine.bundled import TINY_PATH
from cellama.tasks.metrics.rows import TTFT_S

from .load import STREAMED, WHOLE, Load, Seen

MODEL = "bundled"
DASHBOARDS = Path(__file__).resolve().parents[3] / "docs" / "dashboards"
COMMAND = "import sys; from cellama.api.cli import main; sys.argv[0] = 'cellama'; main()"
NUM_WORKERS, NUM_TARGETS = 2, 4
SETTLED_S = 60.0  # until the last of it is scraped
NEAR = 0.1
NEVER = {  # what has no data under this load, and why
    "cellama_bulk_lines": "no bulk run is open",
    "cellama_attempts_total": "no job begins again: no worker ends",
    "cellama_attempt_ends_total": "no job is handed back: no worker ends",
}
NOT_OURS = {
    "http_": "metrics of vLLM's HTTP server; the gateway has cellama_http_*",
    "mm_cache": "there are no pictures",
    'finished_reason="error"': "no request fails",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=5.0, help="of load")
    parser.add_argument("--callers", type=int, default=14, help="requests at once")
    parser.add_argument("--slots", type=int, default=4, help="of the model that streams, on each worker")
    parser.add_argument("--pace", type=float, default=0.2, help="seconds per step at least")
    parser.add_argument("--scrape", type=int, default=5, help="seconds between two scrapes")
    parser.add_argument("--overview", help="vLLM's overview board")
    parser.add_argument("--picture", help="PNG to draw the board to")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    model = {"source": str(args.model or TINY_PATH), "threads": 1, "ctx_per_slot": 1280}
    models = [
        {**model, "id": STREAMED, "n_parallel": args.slots, "capabilities": ["generate"], "speculation": "off"},
        {**model, "id": WHOLE, "n_parallel": 2, "capabilities": ["generate", "embed"]},
    ]
    with tempfile.TemporaryDirectory() as name, Service(Path(name), models) as service, ExitStack() as started:
        prometheus, port = _watched(service, args.scrape, started)
        begun = time.time()
        with service.slowed(args.pace), Client() as client:
            seen = Load(client, port, args.seed).run(args.callers, time.monotonic() + 60 * args.minutes)
        ended = time.time()
        counted = _counted(prometheus, _by_client(seen, args.slots))
        timed = _timed(prometheus, seen)
        boards = [_board_row("ours", _expressions(DASHBOARDS / "cellama.json"), NEVER, prometheus, ended)]
        if args.overview:
            boards.append(_board_row("vLLM's", _expressions(Path(args.overview)), NOT_OURS, prometheus, ended))
        alerts = _alerts(prometheus)
        if args.picture:
            from .picture import draw

            draw(prometheus, DASHBOARDS / "cellama.json", (begun, ended), Path(args.picture))
    wrong = [f"{row['counted']}: {row['prometheus']}, not {row['client']}" for row in counted if row["ratio"] != 1.0]
    wrong += [f"{row['timed']}: {row['ratio']:.3f}" for row in timed if abs(row["ratio"] - 1) > NEAR]
    wrong += [f"{board} board: no data: {expression}" for board, _, missing in boards for expression in missing]
    rows = [*counted, *timed, *(row for _, row, _ in boards), *alerts]
    wrong += [f"alert {row['alert']} is {row['health']}" for row in alerts if row["health"] != "ok"]
    return Report(rows, {"requests per second": len(seen) / (ended - begun)}, caveats=_caveats(seen, args), wrong=wrong)


def _watched(service: Service, scrape_s: int, started: ExitStack) -> tuple[Prometheus, int]:
    """A Prometheus that has seen all, and the port of the gateway."""
    ports = [free_port() for _ in range(NUM_WORKERS)]
    for port in ports:
        service.start_worker(metrics_port=str(port))
    service.wait_ready()
    gateway, queues = free_port(), free_port()
    for name, port, path in (("gateway", gateway, "/ready"), ("metrics", queues, "/metrics")):
        argv = [sys.executable, "-c", COMMAND, name, "--port", str(port)]
        started.enter_context(served(argv, dict(os.environ), port, path))
    targets = {"workers": ports, "queues": [queues], "gateway": [gateway]}
    prometheus = Prometheus(service.folder, targets, scrape_s, DASHBOARDS / "alerts.yml")
    started.callback(prometheus.close)
    wait_until(lambda: prometheus.is_up(NUM_TARGETS), "all targets that are up")
    return prometheus, gateway


def _by_client(seen: Sequence[Seen], num_slots: int) -> dict[str, float]:
    """What the sums of metrics must be when all of it has ended."""
    expected: dict[str, float] = {}
    for model in (STREAMED, WHOLE):
        expected |= _of_model(model, [one for one in seen if one.model == model and not one.num_texts])
    embedded = [one for one in seen if one.num_texts]
    over_http = [one for one in seen if one.kind.startswith("http")]
    bulk = [one for one in seen if one.kind == "bulk"]
    states = Counter("REVOKED" if one.reason == "cancelled" else "SUCCESS" for one in seen if not one.num_texts)
    tokens = {"prompt": "prompt", "cached": "cached", "generated": "generated"}
    return {
        **expected,
        'vllm:inter_token_latency_seconds_count{model_name="streamed"}': sum(
            one.generated - 1 for one in seen if one.model == STREAMED
        ),
        'cellama_texts_total{part="embedder"}': sum(one.num_texts for one in embedded),
        'cellama_text_tokens_total{part="embedder"}': sum(one.prompt for one in embedded),
        'cellama_attempts_total{class="bulk",first="true"}': len(bulk),
        'cellama_attempts_total{class="interactive",first="true"}': len(seen) - len(bulk),
        **{
            f'celery_tasks_total{{name="cellama.generate",state="{state}"}}': number for state, number in states.items()
        },
        'celery_tasks_total{name="cellama.embed",state="SUCCESS"}': len(embedded),
        'cellama_http_requests_total{route="/v1/completions",status="200"}': len(over_http),
        **{
            f'cellama_tenant_tokens_total{{kind="{kind}"}}': sum(getattr(one, name) for one in over_http)
            for kind, name in tokens.items()
        },
        "cellama_workers": NUM_WORKERS,
        f'cellama_queue_workers{{model="{STREAMED}"}}': NUM_WORKERS,
        f'cellama_slots{{model="{STREAMED}"}}': NUM_WORKERS * num_slots,
        "cellama_jobs_waiting": 0,
        "cellama_jobs_running": 0,
        "vllm:num_requests_running": 0,
        "cellama_dead_jobs": 0,
    }


def _of_model(model: str, seen: Sequence[Seen]) -> dict[str, float]:
    """Of its requests that generate."""
    of = f'{{model_name="{model}"}}'
    reasons = Counter(one.reason for one in seen)
    aborted = reasons["cancelled"] + reasons["timeout"]
    prompt, generated = sum(one.prompt for one in seen), sum(one.generated for one in seen)
    return {
        f"vllm:prompt_tokens_total{of}": prompt,
        f"vllm:request_prompt_tokens_sum{of}": prompt,
        f"vllm:prompt_tokens_cached_total{of}": sum(one.cached for one in seen),
        f"vllm:prompt_tokens_by_source_total{of}": prompt,
        f"vllm:generation_tokens_total{of}": generated,
        f"vllm:request_generation_tokens_sum{of}": generated,
        f"vllm:time_to_first_token_seconds_count{of}": len(seen),
        f"vllm:e2e_request_latency_seconds_count{of}": len(seen),
        f'vllm:request_success_total{{model_name="{model}",finished_reason="abort"}}': aborted,
        **{
            f'cellama_requests_total{{model="{model}",finish_reason="{reason}"}}': number
            for reason, number in reasons.items()
        },
    }


def _counted(prometheus: Prometheus, expected: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each, when all are as they must be, or time is up."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        found = {name: prometheus.value(f"sum({name})") for name in expected}
        # A metric that has counted nothing may not be there.
        if all((found[name] or 0.0) == value for name, value in expected.items()) or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    return [
        {"counted": name, "prometheus": found[name], "client": value, "ratio": _ratio(found[name] or 0.0, value)}
        for name, value in expected.items()
    ]


def _ratio(found: float, expected: float) -> float:
    return found / expected if expected else 1.0 if found == expected else float("inf")


def _timed(prometheus: Prometheus, seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """Where the client sees every request of a model, or of a route, its own clock stands against the histogram."""
    streamed = [one for one in seen if one.model == STREAMED]
    firsts_s = [one.first_s for one in streamed if one.first_s is not None]
    told_s = [one.whole_s for one in seen if one.kind.startswith("http")]
    first, of = "vllm:time_to_first_token_seconds", f'{{model_name="{STREAMED}"}}'
    asked = {
        f"{first}, mean": (_mean(first, of), mean(firsts_s)),
        **{
            f"{first}, p{100 * part:.0f}": (
                f"histogram_quantile({part}, sum by (le) ({first}_bucket{of}))",
                quantile(firsts_s, TTFT_S, part),
            )
            for part in (0.5, 0.95)
        },
        "vllm:e2e_request_latency_seconds, mean": (
            _mean("vllm:e2e_request_latency_seconds", of),
            mean(one.whole_s for one in streamed),
        ),
        "cellama_http_request_seconds, mean": (
            _mean("cellama_http_request_seconds", '{route="/v1/completions"}'),
            mean(told_s),
        ),
    }
    found = {name: prometheus.value(expression) or 0.0 for name, (expression, _) in asked.items()}
    return [
        {"timed": name, "prometheus s": found[name], "client s": client_s, "ratio": found[name] / client_s}
        for name, (_, client_s) in asked.items()
    ]


def _mean(name: str, labels: str) -> str:
    return f"sum({name}_sum{labels}) / sum({name}_count{labels})"


def quantile(values: Sequence[float], bounds: Sequence[float], part: float) -> float:
    """As Prometheus' histogram_quantile has it of a histogram of these values: within a bucket all lie evenly."""
    rank, below = part * len(values), 0
    for low, high in zip((0.0, *bounds), bounds, strict=False):
        within = sum(low < value <= high for value in values)
        if within and below + within >= rank:
            return low + (high - low) * (rank - below) / within
        below += within
    return bounds[-1]


def _expressions(board: Path) -> Iterator[str]:
    """Of all panels, those in folded rows, too. A variable has the value that the board begins with, or is any."""
    told = json.loads(board.read_text(encoding="utf-8"))
    values = {known["name"]: known.get("current", {}).get("value") for known in told["templating"]["list"]}
    chosen = {name: value for name, value in values.items() if isinstance(value, str) and not value.startswith("$")}
    panels = list(told["panels"])
    for panel in panels:
        panels += panel.get("panels", ())
        for target in panel.get("targets", ()):
            times = re.sub(r"\$\{?__(rate_interval|interval|range)\}?", "1m", target["expr"])
            yield re.sub(r"\$\{?(\w+)\}?", lambda found: chosen.get(found[1], ".*"), times)


def _board_row(
    name: str, expressions: Iterator[str], never: Mapping[str, str], prometheus: Prometheus, at: float
) -> tuple[str, dict[str, Any], list[str]]:
    """The board's name, how many of its expressions have data, and those that should have some and have none."""
    asked = list(expressions)
    empty = [expression for expression in asked if not prometheus.query(expression, at)]
    missing = [expression for expression in empty if not any(part in expression for part in never)]
    reasons = [why for part, why in never.items() if any(part in expression for expression in empty)]
    row = {
        "board": name,
        "expressions": len(asked),
        "with data": len(asked) - len(empty),
        "the others": "; ".join(reasons),
    }
    return name, row, missing


def _alerts(prometheus: Prometheus) -> list[dict[str, Any]]:
    """What Prometheus made of each, after promtool has checked the file. Raises CalledProcessError."""
    subprocess.run(["promtool", "check", "rules", str(DASHBOARDS / "alerts.yml")], check=True, capture_output=True)
    return [{"alert": rule["name"], "health": rule["health"], "now": rule["state"]} for rule in prometheus.rules()]


def _caveats(seen: Sequence[Seen], args: argparse.Namespace) -> list[str]:
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(Counter(one.kind for one in seen).items()))
    without = "" if args.overview else "; vLLM's overview board was left out: no --overview"
    return [
        f"requests: {kinds}",
        "client, gateway, workers, Redis and Prometheus share the processors; workers are paced",
        f"quantiles of the client are over the same buckets as the histogram's{without}",
    ]

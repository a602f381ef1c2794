"""Compare the batch strategies by time to first token, gaps between tokens, and rate.

Requests have mixed lengths and are all sent at the same time. llama-server, which has a single batch strategy and no
priorities, receives the same requests and has the same number of slots. The steps are also simulated with calculated
costs, because the measurement noise exceeds the differences in rate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import CORES, GREEDY, loaded, model_path, percentile, submit_together, warm_up
from cellama.bench.harness.mixed_load import LoadShape, conversations, flat, sizes
from cellama.bench.harness.report import Report
from cellama.bench.harness.simulation import CHEAP_ROWS, CPU, Costs, simulate
from cellama.bench.harness.workloads import Line
from cellama.bench.peers.programs import llama_server
from cellama.engine import Event, Request, Text
from cellama.engine.scheduling.strategies import make_strategy

STRATEGIES = ("decode_maximal", "balanced", "prefill_priority", "adaptive")
CLASSES = {"interactive": 3, "bulk": 9}  # name → priority
GAP, LONG_GAP, RATE, FIRST = "gap p95 ms", "gap p99 ms", "new tok/s", "ttft p95 ms"
COSTS = {"CPU": CPU, "cheap rows": CHEAP_ROWS}
CAVEATS = [
    "All requests are sent at once, and requests without a slot wait. Each strategy runs once. For bulk requests, "
    "adaptive takes the same steps as prefill_priority, so differences between these two rows are noise.",
    "Larger steps cause longer but fewer gaps, so the strategy with the longest gaps can have a shorter p95.",
    f"Simulated bulk requests: a pass takes {CPU.pass_ms:g} ms, plus {CPU.prompt_row_ms:g} ms per prompt row and "
    f"{CPU.decode_row_ms:g} ms per decode row. With cheap rows, a pass takes {CHEAP_ROWS.pass_ms:g} ms, plus "
    f"{CHEAP_ROWS.prompt_row_ms:g} ms per prompt row.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="factor by which all lengths are multiplied")
    parser.add_argument("--classes", nargs="+", choices=list(CLASSES), default=list(CLASSES))
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    lines = flat(conversations(LoadShape(args.requests, scale=args.scale), seed=args.seed))
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    targets: dict[str, str] = {}
    for name in args.classes:
        found = {strategy: _row(path, args, lines, strategy, CLASSES[name]) for strategy in STRATEGIES}
        rows += [{"requests": name, "strategy": strategy, **row} for strategy, row in found.items()]
        compared, expected = compare(found)
        ratios |= {f"{name}: {key}": value for key, value in compared.items()}
        targets |= {f"{name}: {key}": value for key, value in expected.items()}
    if server := _server_row(path, args, lines):
        rows.append({"requests": "all alike", "strategy": "llama-server", **server})
        compared = over_server(rows)
        ratios, targets = ratios | compared, targets | dict.fromkeys(compared, ">= 1.0")
    for name, costs in COSTS.items():
        found = {strategy: _simulated(strategy, lines, args.slots, costs) for strategy in STRATEGIES}
        rows += [{"simulated": name, "strategy": strategy, **row} for strategy, row in found.items()]
        compared, expected = compare(found)
        ratios |= {f"simulated, {name}: {key}": value for key, value in compared.items()}
        targets |= {f"simulated, {name}: {key}": value for key, value in expected.items()}
    return Report(rows, ratios, targets, CAVEATS)


def compare(found: Mapping[str, Mapping[str, float]]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the ratios between the strategies' results, and the target for each ratio."""
    maximal, balanced, prefill, adaptive = (found[strategy] for strategy in STRATEGIES)
    ratios = {
        "gaps p95, decode_maximal over the shortest other": maximal[GAP] / min(balanced[GAP], prefill[GAP]),
        "gaps p99, balanced over decode_maximal": balanced[LONG_GAP] / maximal[LONG_GAP],
        "gaps p99, prefill_priority over balanced": prefill[LONG_GAP] / balanced[LONG_GAP],
        "rate, prefill_priority over the best other": prefill[RATE] / max(balanced[RATE], maximal[RATE]),
        "rate, balanced over decode_maximal": balanced[RATE] / maximal[RATE],
        "rate, adaptive over the best": adaptive[RATE] / max(row[RATE] for row in found.values()),
        "first token, adaptive over the soonest": adaptive[FIRST] / min(row[FIRST] for row in found.values()),
    }
    targets = dict.fromkeys(ratios, ">= 1.0") | {"gaps p95, decode_maximal over the shortest other": "<= 1.0"}
    return ratios, targets | {
        "first token, adaptive over the soonest": "<= 1.05",
        "rate, adaptive over the best": ">= 0.95",
    }


def over_server(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the ratio of cellama's best value to llama-server's value for each figure.

    llama-server's values are in the last row. A ratio above 1 means that cellama is better.
    """
    *ours, server = rows
    return {
        "rate, the highest over llama-server": max(row[RATE] for row in ours) / server[RATE],
        "first token p95, llama-server over the soonest": server[FIRST] / min(row[FIRST] for row in ours),
        "gap p95, llama-server over the shortest": server[GAP] / min(row[GAP] for row in ours),
    }


def _server_row(path: Path, args: argparse.Namespace, lines: Sequence[Line]) -> dict[str, float] | None:
    load = sizes(lines)
    with llama_server(path, args.slots, load.longest + 1, CORES) as server:
        if not server:
            return None
        seconds, replies = server.complete_all([line.prompt for line in lines], [line.num_new for line in lines])
    gaps_ms = [gap for reply in replies for gap in reply.gaps_ms]
    return _figures(load.new_tokens / seconds, [reply.ttft_s * 1e3 for reply in replies], gaps_ms)


def _simulated(strategy: str, lines: Sequence[Line], slots: int, costs: Costs) -> dict[str, float]:
    found = simulate(make_strategy(strategy), lines, slots, CLASSES["bulk"], costs)
    return _figures(sizes(lines).new_tokens / found.seconds, found.ttft_ms, found.gaps_ms)


def _row(path: Path, args: argparse.Namespace, lines: Sequence[Line], strategy: str, priority: int) -> dict[str, float]:
    load = sizes(lines)
    gaps_ms: list[float] = []
    with loaded(path, n_parallel=args.slots, ctx_per_slot=load.longest + 1, batch_strategy=strategy) as model:
        warm_up(model)
        requests = [
            Request(line.custom_id, line.prompt, GREEDY, max_tokens=line.num_new, ignore_eos=True, priority=priority)
            for line in lines
        ]
        started = time.monotonic()
        handles = submit_together(model, requests, lambda: _Gaps(gaps_ms))
        done = [handle.result() for handle in handles]
        seconds = time.monotonic() - started
    ttft = [completion.timings.ttft_ms or 0.0 for completion in done]
    return _figures(load.new_tokens / seconds, ttft, gaps_ms)


def _figures(rate: float, ttft_ms: Sequence[float], gaps_ms: Sequence[float]) -> dict[str, float]:
    return {
        RATE: rate,
        "ttft p50 ms": percentile(ttft_ms, 0.5),
        FIRST: percentile(ttft_ms, 0.95),
        GAP: percentile(gaps_ms, 0.95),
        LONG_GAP: percentile(gaps_ms, 0.99),
    }


class _Gaps:
    """Records the gaps between a request's pieces of text, in milliseconds."""

    def __init__(self, gaps_ms: list[float]) -> None:
        self._gaps_ms, self._last = gaps_ms, 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Text):
            now = time.monotonic()
            if self._last:
                self._gaps_ms.append((now - self._last) * 1e3)
            self._last = now

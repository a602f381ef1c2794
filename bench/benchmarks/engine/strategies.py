"""Throughput and latency under each batch strategy: requests with long prompts arrive while others decode."""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import GREEDY, loaded, model_path, percentile, random_prompts, warm_up
from cellama.bench.harness.report import Report
from cellama.engine import Event, Request, Text

STRATEGIES = ("decode_maximal", "prefill_priority", "balanced", "adaptive")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--new", type=int, default=48, help="tokens")
    parser.add_argument("--priority", type=int, default=3, help="3 is interactive, 9 is bulk")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    return Report([_row(path, args, strategy) for strategy in STRATEGIES])


def _row(path: Path, args: argparse.Namespace, strategy: str) -> dict[str, Any]:
    rng = random.Random(args.seed)
    prompts = [p[: rng.choice((32, 128, 400))] for p in random_prompts(args.requests, 400, seed=args.seed)]
    gaps_ms: list[float] = []
    with loaded(path, n_parallel=args.slots, ctx_per_slot=512, n_batch=256, batch_strategy=strategy) as model:
        warm_up(model)
        started = time.monotonic()
        handles = []
        for index, prompt in enumerate(prompts):
            request = Request(
                str(index), tuple(prompt), GREEDY, max_tokens=args.new, ignore_eos=True, priority=args.priority
            )
            handles.append(model.engine.submit(request, _Gaps(gaps_ms)))
        done = [handle.result() for handle in handles]
        seconds = time.monotonic() - started
    ttft = [completion.timings.ttft_ms or 0.0 for completion in done]
    return {
        "strategy": strategy,
        "seconds": seconds,
        "tokens/s": args.new * args.requests / seconds,
        "ttft median ms": percentile(ttft, 0.5),
        "ttft p95 ms": percentile(ttft, 0.95),
        "gap median ms": percentile(gaps_ms, 0.5),
        "gap p95 ms": percentile(gaps_ms, 0.95),
    }


class _Gaps:
    """Notes the milliseconds between the texts of one request."""

    def __init__(self, gaps_ms: list[float]) -> None:
        self._gaps_ms, self._last = gaps_ms, 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Text):
            now = time.monotonic()
            if self._last:
                self._gaps_ms.append((now - self._last) * 1e3)
            self._last = now

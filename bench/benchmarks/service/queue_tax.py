"""What the queue costs: jobs through Celery, Redis and a real worker against the same requests given to the engine.

Same model, slots and threads, one after the other on the same machine. Throughput is of all jobs at once, to the last
result; the time to the first token is that of one job at a time.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from cellama.bench.harness.engines import CORES, GREEDY, loaded, model_path, random_prompts, run_all, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service
from cellama.engine import Request

CONTEXT = 1024  # tokens per slot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--samples", type=int, default=10, help="jobs one at a time, for the time to the first token")
    parser.add_argument("--rounds", type=int, default=2, help="of each; the best counts")
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    sets = [random_prompts(args.requests, args.prompt, seed=args.seed + i) for i in range(args.rounds)]
    singles = random_prompts(args.samples, args.prompt, seed=args.seed + args.rounds)
    direct = _directly(path, sets, singles, args)
    queued = _through_the_queue(path, sets, singles, args)
    tokens = args.requests * args.new
    rows: list[dict[str, Any]] = [
        {"way": way, "seconds": seconds, "tok/s": tokens / seconds, "ttft ms": ttft_ms}
        for way, (seconds, ttft_ms) in (("engine", direct), ("queue", queued))
    ]
    ratios = {"throughput, queue over engine": direct[0] / queued[0], "added ttft, ms": queued[1] - direct[1]}
    return Report(rows, ratios, {"throughput, queue over engine": ">= 0.95", "added ttft, ms": "<= 15"})


def _directly(path: Path, sets: list[list[list[int]]], singles: list[list[int]], args: Any) -> tuple[float, float]:
    with loaded(path, n_parallel=args.slots, ctx_per_slot=CONTEXT, cache_prompt=False, threads=args.threads) as model:
        warm_up(model)
        seconds = min(run_all(model, prompts, args.new)[0] for prompts in sets)
        first_ms = []
        for prompt in singles:
            request = Request("single", tuple(prompt), GREEDY, max_tokens=4, ignore_eos=True)
            first_ms.append(model.engine.submit(request).result().timings.ttft_ms or 0.0)
    return seconds, median(first_ms)


def _through_the_queue(
    path: Path, sets: list[list[list[int]]], singles: list[list[int]], args: Any
) -> tuple[float, float]:
    model = {"id": "bench", "source": str(path), "n_parallel": args.slots, "ctx_per_slot": CONTEXT, "default": True}
    model |= {
        "threads": args.threads,
        "cache_prompt": False,
        "capabilities": ["generate"],
        "batch_strategy": "adaptive",
    }
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [model]) as service:
        service.start_worker()
        service.wait_ready()
        from cellama.api import Client
        from cellama.tasks import generate

        params = {"temperature": 0, "ignore_eos": True, "max_tokens": args.new}
        generate.delay("bench", singles[0], **params).get(timeout=600)
        seconds = []
        for prompts in sets:
            started = time.monotonic()
            jobs = [generate.delay("bench", prompt, **params) for prompt in prompts]
            for job in jobs:
                job.get(timeout=3600)
            seconds.append(time.monotonic() - started)
        first_ms = []
        with Client() as client:
            for prompt in singles:
                started = time.monotonic()
                stream = client.generate("bench", prompt, **{**params, "max_tokens": 4}).stream()
                next(event for event in stream if event["type"] == "token")
                first_ms.append((time.monotonic() - started) * 1e3)
                list(stream)
    os.environ.pop("CELLAMA_MODELS", None)
    return min(seconds), median(first_ms)

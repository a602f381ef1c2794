"""An urgent job through the queue while a worker is full of bulk jobs and more wait, against one that finds it idle."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from .engines import CORES, model_path, random_prompts
from .report import Report
from .service import Service, wait_until


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--bulk", type=int, default=264, help="bulk jobs, resident and waiting")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64, help="tokens per bulk job")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    prompts = random_prompts(args.bulk + 2 * args.samples, args.prompt, seed=args.seed)
    model = {"id": "bench", "source": str(model_path(args.model)), "n_parallel": args.slots, "default": True}
    model |= {"threads": args.threads, "capabilities": ["generate"], "ctx_per_slot": 512, "batch_strategy": "adaptive"}
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [model]) as service:
        service.start_worker()
        service.wait_ready()
        from cellama.api import Client
        from cellama.tasks import generate

        with Client() as client:
            idle = [_ttft_ms(client, prompts.pop()) for _ in range(args.samples)]
            params = {"temperature": 0, "ignore_eos": True, "max_tokens": args.new, "priority": 9, "stream": False}
            bulk = [generate.delay("bench", prompt, **params) for prompt in prompts[: args.bulk]]
            wait_until(lambda: client.stats()["slots_busy"] == args.slots, "a worker full of bulk jobs")
            busy = []
            for _ in range(args.samples):
                time.sleep(0.5)
                busy.append(_ttft_ms(client, prompts.pop()))
            waiting = client.stats()["waiting"]["bench"]
            finished = sum(bool(job.get(timeout=3600)["usage"]["completion_tokens"] == args.new) for job in bulk)
    rows: list[dict[str, Any]] = [
        {"worker": "idle", "median ttft ms": median(idle), "worst ms": max(idle)},
        {"worker": "full of bulk jobs", "median ttft ms": median(busy), "worst ms": max(busy)},
    ]
    ratios = {"busy over idle": median(busy) / median(idle), "bulk jobs finished": float(finished)}
    caveats = [f"{waiting} bulk jobs still waited for a slot after the last sample."]
    return Report(rows, ratios, {"busy over idle": "<= 2.5", "bulk jobs finished": str(args.bulk)}, caveats)


def _ttft_ms(client: Any, prompt: list[int]) -> float:
    started = time.monotonic()
    stream = client.generate("bench", prompt, temperature=0, ignore_eos=True, max_tokens=8).stream(timeout=600)
    next(event for event in stream if event["type"] == "token")
    first = time.monotonic()
    list(stream)
    return (first - started) * 1e3

"""An interactive request into an engine whose slots are full of bulk work, against one into an idle engine."""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

from cellama.engine import Model, Request

from .engines import GREEDY, loaded, model_path, random_prompts, warm_up
from .report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="tokens, of bulk and interactive requests")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    prompts = random_prompts(args.slots * 3 + 2 * args.samples, args.prompt, seed=args.seed)
    with loaded(path, n_parallel=args.slots, ctx_per_slot=1024, n_batch=512, kv_layout="partitioned") as model:
        warm_up(model)
        idle = [_ttft_ms(model, prompts.pop()) for _ in range(args.samples)]
        bulk = [
            model.engine.submit(Request(f"bulk {i}", tuple(p), GREEDY, max_tokens=800, ignore_eos=True, priority=9))
            for i, p in enumerate(prompts[: args.slots * 2])
        ]
        while model.engine.snapshot().slots_decoding < args.slots:
            time.sleep(0.05)
        busy = []
        for _ in range(args.samples):
            time.sleep(0.5)
            busy.append(_ttft_ms(model, prompts.pop()))
        preempted = model.engine.snapshot().preemptions
        for handle in bulk:
            handle.cancel()
    rows: list[dict[str, Any]] = [
        {"engine": "idle", "median ttft ms": median(idle), "worst ms": max(idle)},
        {"engine": "all slots busy with bulk", "median ttft ms": median(busy), "worst ms": max(busy)},
    ]
    ratios = {"busy over idle": median(busy) / median(idle), "preemptions": float(preempted)}
    return Report(rows, ratios, {"busy over idle": "<= 2"})


def _ttft_ms(model: Model, prompt: list[int]) -> float:
    request = Request("interactive", tuple(prompt), GREEDY, max_tokens=8, ignore_eos=True, priority=3)
    return model.engine.submit(request).result().timings.ttft_ms or 0.0

"""An interactive request into an engine whose slots are full of bulk work, against one into an idle engine."""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from cellama.bench.harness.engines import GREEDY, loaded, model_path, random_prompts, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import wait_until
from cellama.engine import Event, Finished, Handle, Model, Request


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
        with _bulk_work(model, prompts[: args.slots * 2]):
            wait_until(lambda: model.engine.snapshot().slots_decoding == args.slots, "slots full of bulk work")
            busy = []
            for _ in range(args.samples):
                time.sleep(0.5)
                busy.append(_ttft_ms(model, prompts.pop()))
            preempted = model.engine.snapshot().preemptions
    rows: list[dict[str, Any]] = [
        {"engine": "idle", "median ttft ms": median(idle), "worst ms": max(idle)},
        {"engine": "all slots busy with bulk", "median ttft ms": median(busy), "worst ms": max(busy)},
    ]
    ratios = {"busy over idle": median(busy) / median(idle), "preemptions": float(preempted)}
    return Report(rows, ratios, {"busy over idle": "<= 2"})


@contextlib.contextmanager
def _bulk_work(model: Model, prompts: list[list[int]]) -> Iterator[None]:
    """A bulk request per prompt at any time, for the length of a `with` block: one that ends is followed by another."""
    handles: dict[str, Handle] = {}
    over = threading.Event()

    def begin(name: str, prompt: tuple[int, ...]) -> None:
        request = Request(name, prompt, GREEDY, max_tokens=800, ignore_eos=True, priority=9)
        handles[name] = model.engine.submit(request, lambda event: follow(event, prompt))

    def follow(event: Event, prompt: tuple[int, ...]) -> None:
        if isinstance(event, Finished) and not over.is_set():
            begin(event.request_id, prompt)

    for number, prompt in enumerate(prompts):
        begin(f"bulk {number}", tuple(prompt))
    yield
    over.set()
    for handle in handles.values():
        handle.cancel()


def _ttft_ms(model: Model, prompt: list[int]) -> float:
    request = Request("interactive", tuple(prompt), GREEDY, max_tokens=8, ignore_eos=True, priority=3)
    return model.engine.submit(request).result().timings.ttft_ms or 0.0

"""What requests with different LoRA adapters on one engine cost, by the length of a turn (ADR 004)."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from cellama.bench.harness.engines import CORES, GREEDY, loaded, model_path, percentile, random_prompts, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.models.synthetic_adapter import shape_of, write_adapter
from cellama.engine import Event, Model, Request, Text
from cellama.engine.scheduling import adapter_rotation as rotation

Choice = tuple[tuple[str, float], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=12)
    parser.add_argument("--sets", type=int, default=3, help="different adapter sets: scales of one adapter")
    parser.add_argument("--turns", type=float, nargs="+", default=[0.0, 0.05, 0.1, 0.2, 0.5], help="seconds")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--new", type=int, default=48, help="tokens")
    parser.add_argument("--threads", type=int, default=CORES)


def run(args: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        adapter = Path(folder) / "adapter.gguf"
        write_adapter(adapter, shape_of(model_path(args.model)), rank=args.rank)
        options = {"n_parallel": args.slots, "ctx_per_slot": args.prompt + args.new, "threads": args.threads}
        with loaded(model_path(args.model), **options) as model:
            model.load_adapter("bench", str(adapter), scale=0)
            warm_up(model)
            rows = [_row("no adapter", model, args, [()], rotation.SLICE_S)]
            rows.append(_row("one for all", model, args, [(("bench", 1.0),)], rotation.SLICE_S))
            sets: list[Choice] = [(("bench", (i + 1) / args.sets),) for i in range(args.sets)]
            rows += [_row(f"{args.sets} sets", model, args, sets, turn) for turn in args.turns]
    best = max(row["tokens/s"] for row in rows[2:])
    return Report(rows, {"best of several sets over one for all": best / rows[1]["tokens/s"]})


def _row(name: str, model: Model, args: argparse.Namespace, sets: list[Choice], turn_s: float) -> dict[str, Any]:
    """All slots at once, the sets one after another among them."""
    times: list[list[float]] = [[] for _ in range(args.slots)]
    prompts = random_prompts(args.slots, args.prompt)
    with _turns_of(turn_s):
        started = time.monotonic()
        handles = []
        for i, prompt in enumerate(prompts):
            params = {"max_tokens": args.new, "ignore_eos": True, "cache_prompt": False}
            request = Request(str(i), tuple(prompt), GREEDY, adapters=sets[i % len(sets)], **params)
            handles.append(model.engine.submit(request, _noting(times[i])))
        for handle in handles:
            handle.result()
        seconds = time.monotonic() - started
    gaps = [b - a for told in times for a, b in pairwise(told)]
    found = {"requests": name, "turn s": turn_s, "tokens/s": args.slots * args.new / seconds}
    first = median(told[0] - started for told in times)
    return {
        **found,
        "first token s": first,
        "gap p50 ms": median(gaps) * 1e3,
        "gap p99 ms": percentile(gaps, 0.99) * 1e3,
    }


def _noting(times: list[float]) -> Any:
    def note(event: Event) -> None:
        if isinstance(event, Text):
            times.append(time.monotonic())

    return note


@contextmanager
def _turns_of(seconds: float) -> Iterator[None]:
    usual, rotation.SLICE_S = rotation.SLICE_S, seconds
    yield
    rotation.SLICE_S = usual

"""What a folder of states costs beside: the gaps of a stream while it is filled, the rate of what shares nothing."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from cellama.bench.benchmarks.models.loads import Stream
from cellama.bench.harness.engines import GREEDY, loaded, percentile, random_prompts, run_all, submit_together, warm_up
from cellama.bench.harness.report import Report
from cellama.engine import Model, Request

TAIL = 64  # tokens in which the prompts differ whose states are written: enough for a state each
WARM_UP_TOKENS = 8
STREAM_TOKENS = 2048  # of a slot beside a prompt: a round takes fewer
SAVE_S = 120.0
LONGEST, P99 = "longest gap beside saves over without", "p99 gap beside saves over without"
LOAD_SLOTS, LOAD_PROMPT, LOAD_NEW = 16, 256, 32
RATE = "rate without sharing, folder over none"


def measure_gaps(path: Path, args: argparse.Namespace) -> Report:
    """In the first round states are copied from slots and written, in the others they are in RAM already."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        options = {"cache_dir": folder, "cache_ram_bytes": 8 << 30, "n_parallel": args.states + 2}
        with loaded(path, ctx_per_slot=args.prompt + STREAM_TOKENS, **options) as model:
            warm_up(model)
            for number in range(args.rounds):
                rows.append(_round(model, args, number))
                assert model.engine.store is not None
                model.engine.store.clear()
    return Report(
        rows,
        {
            LONGEST: median(row["longest ms"] / row["without: longest ms"] for row in rows),
            P99: median(row["p99 ms"] / row["without: p99 ms"] for row in rows),
        },
        {LONGEST: "<= 1.2", P99: "<= 1.2"},
        ["Gaps without: of the same stream for some seconds before and after; of the two longest ones the mean."],
    )


def _round(model: Model, args: argparse.Namespace, number: int) -> dict[str, Any]:
    stream = Stream(model, random_prompts(1, 32, seed=1000 + number)[0])
    stream.wait_for(WARM_UP_TOKENS)
    if number == 0:
        _fill(model, args)
    store, engine = model.engine.store, model.engine
    assert store is not None
    before = _alone(stream, args.seconds)
    written, drops, started = store.counters.written_bytes, sum(store.counters.drops.values()), time.monotonic()
    num_saved = engine.save_states(SAVE_S)
    ended = time.monotonic()
    beside = stream.gaps_ms(started, ended)
    after = _alone(stream, args.seconds)
    stream.handle.cancel()
    engine.wait_until_idle(SAVE_S)
    return {
        "states from": "RAM" if number else "slots",
        "written": num_saved,
        "MB": (store.counters.written_bytes - written) / 1e6,
        "dropped": sum(store.counters.drops.values()) - drops,
        "seconds": ended - started,
        "longest ms": max(beside),
        "p99 ms": percentile(beside, 0.99),
        "median ms": median(beside),
        "without: longest ms": (max(before) + max(after)) / 2,
        "without: p99 ms": percentile(before + after, 0.99),
        "without: median ms": median(before + after),
    }


def _fill(model: Model, args: argparse.Namespace) -> None:
    """Idle slots hold so many states. They share all but their ends, so that they are soon computed."""
    prompts = random_prompts(args.states, args.prompt, shared=args.prompt - TAIL, seed=args.seed)
    for part in (prompts[:1], prompts[1:]):
        requests = [Request(str(i), tuple(prompt), GREEDY, max_tokens=1) for i, prompt in enumerate(part)]
        for handle in submit_together(model, requests):
            handle.result()


def _alone(stream: Stream, seconds: float) -> list[float]:
    """The gaps of so many seconds in which nothing else is done."""
    started = time.monotonic()
    while time.monotonic() < started + seconds and not stream.handle.done:
        stream.wait_for(len(stream.times) + 1)
    return stream.gaps_ms(started, time.monotonic())


def measure_load(path: Path, args: argparse.Namespace) -> Report:
    """Requests of which none shares anything, with a folder and without, in turns."""
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        prompts = random_prompts(args.requests, LOAD_PROMPT, seed=args.seed + 1 + number)
        ways = (True, False) if number % 2 else (False, True)
        rows += [_load(path, prompts, with_folder) for with_folder in ways]
    rates = {way: [row["tok/s"] for row in rows if row["load"] == way] for way in ("with a folder", "without")}
    return Report(
        rows,
        {RATE: median(rates["with a folder"]) / median(rates["without"])},
        {RATE: ">= 0.98"},
        [f"The load: {args.requests} interactive requests of {LOAD_PROMPT} + {LOAD_NEW} tokens, {LOAD_SLOTS} slots."],
    )


def _load(path: Path, prompts: list[list[int]], with_folder: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = {"cache_dir": folder} if with_folder else {}
        with loaded(path, n_parallel=LOAD_SLOTS, ctx_per_slot=LOAD_PROMPT + LOAD_NEW, **options) as model:
            warm_up(model)
            seconds, _ = run_all(model, prompts, LOAD_NEW)
            snapshot = model.engine.snapshot()
            return {
                "load": "with a folder" if with_folder else "without",
                "tok/s": len(prompts) * (LOAD_PROMPT + LOAD_NEW) / seconds,
                "states in RAM": snapshot.ram_saves,
                "files written": snapshot.disk_saves,
            }

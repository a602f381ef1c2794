"""Workers that share a machine, with each other and with another busy program: what `threads = "auto"` makes of it.

One worker alone, two workers, and one beside a program that keeps a core busy, each full of jobs; for comparison one
worker with one thread. Rates are tokens sampled within a window, once the workers had time to see each other.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from cellama.bench.harness.engines import CORES, model_path, random_prompts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, wait_until
from cellama.engine.system import processors
from cellama.tasks.state.registry import live_workers

PROMPT_TOKENS = 16
BUSY = "while True: pass"
DISTURBED = 0.15  # cores that other programs used: such a window is measured again
AUTO, ONE = "auto", "one-thread"  # ids of the two models, which are one file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--new", type=int, default=1000, help="tokens per job; they must last for the time of a window")
    parser.add_argument("--settle", type=float, default=9.0, help="seconds before a window")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=6, help="windows at most, until other programs leave one alone")
    parser.add_argument(
        "--threads", type=int, default=None, help=f"instead of sharing; {CORES} is what one takes alone"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    model = {"source": str(model_path(args.model)), "n_parallel": args.slots, "ctx_per_slot": PROMPT_TOKENS + args.new}
    model |= {"capabilities": ["generate"], "cache_prompt": False}
    auto = {**model, "id": AUTO, "default": True} | ({"threads": args.threads} if args.threads else {})
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Service(Path(folder), [auto, {**model, "id": ONE, "threads": 1}]) as s,
    ):
        s.start_worker()
        for _ in range(args.rounds):
            rows.append(_measured("one worker, one thread", s, ONE, args))
            rows.append(_measured("one worker", s, AUTO, args))
            with _busy_program() as program:
                rows.append(_measured("one worker beside a busy program", s, AUTO, args, program))
            with _second_worker(s):
                rows.append(_measured("two workers", s, AUTO, args))
    return Report(_medians(rows), *_ratios(rows), _caveats(rows))


@contextlib.contextmanager
def _busy_program() -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _second_worker(service: Service) -> Iterator[None]:
    name = service.start_worker()
    try:
        yield
    finally:
        service.processes[name].terminate()
        service.processes.pop(name).wait()


def _measured(way: str, service: Service, model: str, args: Any, *programs: psutil.Process) -> dict[str, Any]:
    """A row: the rate of the workers that live now, full of jobs, and what went on meanwhile."""
    from cellama.api import Client

    service.wait_ready()
    count = 6 * args.slots * len(service.processes)
    prompts = random_prompts(count, PROMPT_TOKENS, seed=args.seed)
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": args.new, "stream": False}
    ours = [*(psutil.Process(process.pid) for process in service.processes.values()), *programs]
    with Client() as client:
        jobs = client.generate_many(model, prompts, **params)
        wait_until(lambda: client.stats()["slots_busy"], "busy slots")
        for _ in range(args.tries):
            rate, others = _window(service, ours, args.settle, args.seconds)
            if others < DISTURBED:
                break
        lasts = bool(client.stats()["slots_busy"])
        threads = [entry["threads"] for w in live_workers(service.redis) for entry in w.models if entry["id"] == model]
        for job in jobs:
            client.cancel(job.id)
        wait_until(lambda: not client.stats()["slots_busy"], "idle slots")
    row = {"way": way, "tok/s": rate, "threads": "+".join(map(str, threads)), "other programs": others}
    return {**row, "lasts": lasts}


def _window(service: Service, ours: list[psutil.Process], settle_s: float, seconds: float) -> tuple[float, float]:
    """Tokens per second within a window, and the cores that programs used until its end which are no part of this."""

    def used() -> float:
        reading = processors.read()
        own = sum(float(times.user + times.system) for times in (process.cpu_times() for process in ours))
        return reading.busy_s - own if reading else 0.0

    before = used()
    time.sleep(settle_s)
    started, tokens = time.monotonic(), service.num_sampled()
    time.sleep(seconds)
    elapsed = time.monotonic() - started
    return (service.num_sampled() - tokens) / elapsed, (used() - before) / (settle_s + elapsed)


def _medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ways = dict.fromkeys(row["way"] for row in rows)
    found = []
    for way in ways:
        same = [row for row in rows if row["way"] == way]
        rates = [row["tok/s"] for row in same]
        row = {"way": way, "tok/s": median(rates), "least": min(rates), "most": max(rates)}
        row |= {"threads": ", ".join(dict.fromkeys(row["threads"] for row in same))}
        found.append({**row, "other programs, cores": median(row["other programs"] for row in same)})
    return found


def _ratios(rows: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, str]]:
    """Medians of the rounds' ratios: what is compared was measured within one round."""

    def ratio(way: str, base: str) -> float:
        rates: dict[str, list[float]] = {
            name: [row["tok/s"] for row in rows if row["way"] == name] for name in (way, base)
        }
        return median(a / max(b, 1e-9) for a, b in zip(rates[way], rates[base], strict=True))

    ratios = {
        "two workers over one": ratio("two workers", "one worker"),
        "beside a busy program over one thread alone": ratio(
            "one worker beside a busy program", "one worker, one thread"
        ),
    }
    return ratios, dict.fromkeys(ratios, ">= 0.8")


def _caveats(rows: list[dict[str, Any]]) -> list[str]:
    known = f"other programs, Redis and this producer among them, use {DISTURBED} cores or more"
    caveats = [f"A window is measured again if {known}."]
    if not all(row["lasts"] for row in rows):
        caveats.append("Jobs did not last in every window: rates are too low; raise --new.")
    return caveats

"""An urgent job through the queue while a worker is full of bulk work and more waits, against one that finds it idle.

The bulk work is either jobs of their own or the lines of a `cellama batch run`.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from .engines import CORES, model_path, random_prompts
from .offline_ours import batch_command
from .report import Report
from .service import PATIENCE_S, Service, wait_until
from .workloads import Line, write_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--work", choices=("jobs", "batch"), default="jobs", help="what the bulk work is")
    parser.add_argument("--bulk", type=int, default=264, help="bulk jobs or lines, resident and waiting")
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

        begin = _bulk_jobs if args.work == "jobs" else _bulk_run
        with Client() as client, contextlib.ExitStack() as opened:
            idle = [_ttft_ms(client, prompts.pop()) for _ in range(args.samples)]
            num_finished = opened.enter_context(begin(Path(folder), prompts[: args.bulk], args.new))
            wait_until(lambda: client.stats()["slots_busy"] == args.slots, "a worker full of bulk work")
            busy = []
            for _ in range(args.samples):
                time.sleep(0.5)
                busy.append(_ttft_ms(client, prompts.pop()))
            still_full = client.stats()["slots_busy"] >= args.slots - 1  # the last sample's may be free just now
            finished = num_finished()
    rows: list[dict[str, Any]] = [
        {"worker": "idle", "median ttft ms": median(idle), "worst ms": max(idle)},
        {"worker": "full of bulk work", "median ttft ms": median(busy), "worst ms": max(busy)},
    ]
    ratios = {"busy over idle": median(busy) / median(idle), "bulk finished": float(finished)}
    caveats = [] if still_full else ["The bulk work did not last: the worker was not full after the last sample."]
    return Report(rows, ratios, {"busy over idle": "<= 2.5", "bulk finished": str(args.bulk)}, caveats)


@contextlib.contextmanager
def _bulk_jobs(_folder: Path, prompts: Sequence[list[int]], num_new: int) -> Iterator[Callable[[], int]]:
    """A job per prompt; yields what waits for them and counts those with all their tokens."""
    from cellama.tasks import generate

    params = {"temperature": 0, "ignore_eos": True, "max_tokens": num_new, "priority": 9, "stream": False}
    jobs = [generate.delay("bench", prompt, **params) for prompt in prompts]
    yield lambda: sum(bool(job.get(timeout=3600)["usage"]["completion_tokens"] == num_new) for job in jobs)


@contextlib.contextmanager
def _bulk_run(folder: Path, prompts: Sequence[list[int]], num_new: int) -> Iterator[Callable[[], int]]:
    """`cellama batch run` with a line per prompt; yields what waits for its end and counts the results."""
    source, target = folder / "bulk.jsonl", folder / "bulk.out.jsonl"
    write_lines(source, [Line(str(number), tuple(prompt), num_new) for number, prompt in enumerate(prompts)])
    with (folder / "bulk.log").open("wb") as log:
        process = subprocess.Popen(batch_command(source, target), stdout=log, stderr=log)

    def num_finished() -> int:
        process.wait(PATIENCE_S)
        return target.read_bytes().count(b"\n")

    try:
        yield num_finished
    finally:
        process.terminate()  # no more than a word to one that has ended
        process.wait()


def _ttft_ms(client: Any, prompt: list[int]) -> float:
    started = time.monotonic()
    stream = client.generate("bench", prompt, temperature=0, ignore_eos=True, max_tokens=8).stream(timeout=600)
    next(event for event in stream if event["type"] == "token")
    first = time.monotonic()
    list(stream)
    return (first - started) * 1e3

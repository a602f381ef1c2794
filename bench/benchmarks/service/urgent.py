"""An urgent job through the queue while a worker is full of bulk work and more waits, against one that finds it idle.

The bulk work is either jobs of their own or the lines of a `cellama batch run`.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from cellama.bench.benchmarks.bulk.offline_ours import batch_command
from cellama.bench.harness.engines import CORES, model_path, random_prompts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import PATIENCE_S, Service, wait_until
from cellama.bench.harness.workloads import Line, write_lines


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
    prompts = random_prompts(2 * args.samples, args.prompt, seed=args.seed)
    model = {"id": "bench", "source": str(model_path(args.model)), "n_parallel": args.slots, "default": True}
    model |= {"threads": args.threads, "capabilities": ["generate"], "ctx_per_slot": 512, "batch_strategy": "adaptive"}
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [model]) as service:
        service.start_worker()
        service.wait_ready()
        from cellama.api import Client

        begin = _bulk_jobs if args.work == "jobs" else _bulk_run
        with Client() as client:
            idle = [_ttft_ms(client, prompts.pop()) for _ in range(args.samples)]
            busy: list[float] = []
            num_begun = num_finished = 0
            count = args.bulk
            while len(busy) < args.samples:  # work that ends before the samples are taken is begun again, twice as long
                bulk = random_prompts(count, args.prompt, seed=args.seed + count)
                with begin(Path(folder), bulk, args.new) as work:
                    busy += _beside(client, work, args.slots, prompts[len(busy) :])
                    num_begun, num_finished = num_begun + count, num_finished + work.num_finished()
                count *= 2
    rows: list[dict[str, Any]] = [
        {"worker": "idle", "median ttft ms": median(idle), "worst ms": max(idle)},
        {"worker": "full of bulk work", "median ttft ms": median(busy), "worst ms": max(busy)},
    ]
    ratios = {"busy over idle": median(busy) / median(idle), "bulk finished": num_finished / num_begun}
    return Report(rows, ratios, {"busy over idle": "<= 2.5", "bulk finished": "1"})


class _Work(Protocol):
    """Bulk work that has begun."""

    def ended(self) -> bool: ...

    def num_finished(self) -> int:
        """Waits for its end, and counts what finished with all its tokens."""
        ...


def _beside(client: Any, work: _Work, num_slots: int, prompts: Sequence[list[int]]) -> list[float]:
    """Times to the first token of urgent jobs, one after another, as long as the worker is full of the work."""
    times: list[float] = []
    for prompt in prompts:
        wait_until(lambda: work.ended() or client.stats()["slots_busy"] == num_slots, "a worker full of bulk work")
        taken = _ttft_ms(client, prompt)
        if work.ended():
            break
        times.append(taken)
        time.sleep(0.5)
    return times


class _Jobs:
    """Jobs of their own."""

    def __init__(self, jobs: Sequence[Any], num_new: int) -> None:
        self._jobs, self._num_new = jobs, num_new

    def ended(self) -> bool:
        return bool(self._jobs[-1].ready())

    def num_finished(self) -> int:
        results = [job.get(timeout=3600) for job in self._jobs]
        return sum(bool(result["usage"]["completion_tokens"] == self._num_new) for result in results)


class _BulkRun:
    """A command that runs, and its output."""

    def __init__(self, process: subprocess.Popen[bytes], target: Path) -> None:
        self._process, self._target = process, target

    def ended(self) -> bool:
        return self._process.poll() is not None

    def num_finished(self) -> int:
        self._process.wait(PATIENCE_S)
        return self._target.read_bytes().count(b"\n")


@contextlib.contextmanager
def _bulk_jobs(_folder: Path, prompts: Sequence[list[int]], num_new: int) -> Iterator[_Work]:
    """A job per prompt."""
    from cellama.tasks import GenerateParams, generate

    params: GenerateParams = {"temperature": 0, "ignore_eos": True, "max_tokens": num_new, "priority": 9}
    params["stream"] = False
    yield _Jobs([generate.delay("bench", prompt, **params) for prompt in prompts], num_new)


@contextlib.contextmanager
def _bulk_run(folder: Path, prompts: Sequence[list[int]], num_new: int) -> Iterator[_Work]:
    """`cellama batch run` with a line per prompt."""
    source, target = folder / f"bulk{len(prompts)}.jsonl", folder / f"bulk{len(prompts)}.out.jsonl"
    write_lines(source, [Line(str(number), tuple(prompt), num_new) for number, prompt in enumerate(prompts)])
    with (folder / "bulk.log").open("wb") as log:
        process = subprocess.Popen(batch_command(source, target), stdout=log, stderr=log)
    try:
        yield _BulkRun(process, target)
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

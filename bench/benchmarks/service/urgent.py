"""Compare urgent jobs on a worker with a backlog of bulk work to urgent jobs on an idle worker.

The bulk work consists of separate jobs or of the lines of a `cellama batch run`. The same amount of bulk work runs once
alone, and once with an urgent job every few seconds. The loss of throughput consists of the urgent jobs' work and the
cost of interrupting bulk work. The urgent jobs' own time is computed from their durations on an idle worker, so that
both parts of the loss are known.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from cellama.bench.benchmarks.load.ours import batch_command
from cellama.bench.harness.engines import CORES, model_path, percentile, random_prompts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import PATIENCE_S, serving, wait_until
from cellama.bench.harness.workloads import Line, write_lines

POLL_S = 0.05  # between two checks whether the bulk work has ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--work", choices=("jobs", "batch"), default="jobs", help="kind of bulk work")
    parser.add_argument("--bulk", type=int, default=420, help="number of running and waiting bulk jobs or lines")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64, help="number of tokens per bulk job")
    parser.add_argument("--samples", type=int, default=24, help="minimum number of urgent jobs")
    parser.add_argument("--pause", type=float, default=4.0, help="pause in seconds between urgent jobs")
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    model = {"source": str(model_path(args.model)), "n_parallel": args.slots, "threads": args.threads}
    model |= {"capabilities": ["generate"], "ctx_per_slot": 512, "batch_strategy": "adaptive"}
    with serving(model) as service:
        from cellama.api import Client

        with Client() as client:
            return _measure(client, service.folder, args)


def _measure(client: Any, folder: Path, args: argparse.Namespace) -> Report:
    urgent = _endless_prompts(args.prompt, args.seed)
    idle, idle_s = zip(*(_run_urgent(client, next(urgent)) for _ in range(args.samples)), strict=True)
    alone, busy = _BulkWork(args, folder, 1), _BulkWork(args, folder, 2)
    print(f"idle: first token after {median(idle):.0f} ms", flush=True)
    alone.run(lambda work: None)
    print(f"bulk work alone: {alone.rate:.1f} tokens/s", flush=True)
    times: list[float] = []

    def send_urgent_jobs(work: _Work) -> None:
        for taken in _beside(client, work, args, urgent):
            times.append(taken)
            print(f"during bulk work, urgent job {len(times)}: first token after {taken:.0f} ms", flush=True)

    while len(times) < args.samples:  # if the work ends before the samples are taken, twice the work is run
        busy.run(send_urgent_jobs)
    own_share = len(times) * median(idle_s) / busy.seconds
    rows = [_row("idle", idle, None), _row("full of bulk work", times, busy), _row("bulk work alone", [], alone)]
    ratios = {
        "busy over idle": median(times) / median(idle),
        "busy over idle, p95": percentile(times, 0.95) / percentile(idle, 0.95),
        "bulk rate kept": busy.rate / alone.rate,
        "bulk rate kept, excluding the urgent jobs' own time": busy.rate / alone.rate / (1 - own_share),
        "bulk finished": (alone.num_finished + busy.num_finished) / (alone.num_begun + busy.num_begun),
    }
    targets = {"busy over idle": "<= 1.25", "busy over idle, p95": "<= 1.6", "bulk rate kept": ">= 0.95"}
    return Report(rows, ratios, {**targets, "bulk finished": "1"})


def _row(worker: str, times: Sequence[float], bulk: _BulkWork | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"median ttft ms": "-", "p95 ms": "-", "worst ms": "-"}
    if times:
        shown = {"median ttft ms": median(times), "p95 ms": percentile(times, 0.95), "worst ms": max(times)}
    return {"worker": worker, "samples": len(times), **shown, "bulk tok/s": bulk.rate if bulk else "-"}


class _BulkWork:
    """Runs bulk work, and measures its rate from start to end."""

    def __init__(self, args: argparse.Namespace, folder: Path, seed: int) -> None:
        self._args, self._folder, self._seed = args, folder, 10 * args.seed + seed
        self._begin = _bulk_jobs if args.work == "jobs" else _bulk_run
        self._count = args.bulk
        self.seconds = 0.0
        self.num_begun = self.num_finished = 0

    def run(self, meanwhile: Callable[[_Work], None]) -> None:
        """Run the bulk work. Each call runs twice as much work as the previous call."""
        prompts = random_prompts(self._count, self._args.prompt, seed=10_000 * self._seed + self._count)
        started = time.monotonic()
        with self._begin(self._folder, prompts, self._args.new) as work:
            meanwhile(work)
            self.num_finished += work.num_finished()
        self.seconds += time.monotonic() - started
        self.num_begun += self._count
        self._count *= 2

    @property
    def rate(self) -> float:
        """Return the generated tokens per second."""
        return float(self.num_finished * self._args.new / self.seconds)


def _endless_prompts(length: int, seed: int) -> Iterator[list[int]]:
    for number in itertools.count(1_000_000 * (seed + 1)):
        yield from random_prompts(100, length, seed=number)


class _Work(Protocol):
    """Bulk work that has started."""

    def ended(self) -> bool: ...

    def num_finished(self) -> int:
        """Wait until the work has ended, and return the number of jobs that finished with all of their tokens."""
        ...


def _beside(client: Any, work: _Work, args: argparse.Namespace, prompts: Iterator[list[int]]) -> Iterator[float]:
    """Yield the times to first token of consecutive urgent jobs while bulk work fills the worker."""

    def is_full() -> bool:
        return bool(client.stats()["slots_busy"] == args.slots)

    while True:
        wait_until(lambda: work.ended() or is_full(), "a worker full of bulk work")
        ttft_ms, _ = _run_urgent(client, next(prompts))
        if work.ended():
            return
        yield ttft_ms
        until = time.monotonic() + args.pause
        while time.monotonic() < until and not work.ended():  # a longer pause would count as bulk work
            time.sleep(POLL_S)


class _Jobs:
    """Bulk work that consists of separate jobs."""

    def __init__(self, jobs: Sequence[Any], num_new: int) -> None:
        self._jobs, self._num_new = jobs, num_new

    def ended(self) -> bool:
        return bool(self._jobs[-1].ready())

    def num_finished(self) -> int:
        results = [job.get(timeout=3600) for job in self._jobs]
        return sum(bool(result["usage"]["completion_tokens"] == self._num_new) for result in results)


class _BulkRun:
    """A running `cellama batch run` command and its output."""

    def __init__(self, process: subprocess.Popen[bytes], target: Path) -> None:
        self._process, self._target = process, target

    def ended(self) -> bool:
        return self._process.poll() is not None

    def num_finished(self) -> int:
        self._process.wait(PATIENCE_S)
        return self._target.read_bytes().count(b"\n")


@contextlib.contextmanager
def _bulk_jobs(_folder: Path, prompts: Sequence[list[int]], num_new: int) -> Iterator[_Work]:
    """Run one bulk job per prompt."""
    from cellama.tasks import GenerateParams, generate

    params: GenerateParams = {"temperature": 0, "ignore_eos": True, "max_tokens": num_new, "priority": 9}
    params["stream"] = False
    yield _Jobs([generate.delay("bench", prompt, **params) for prompt in prompts], num_new)


@contextlib.contextmanager
def _bulk_run(folder: Path, prompts: Sequence[list[int]], num_new: int) -> Iterator[_Work]:
    """Run `cellama batch run` with one line per prompt."""
    source, target = folder / f"bulk{len(prompts)}.jsonl", folder / f"bulk{len(prompts)}.out.jsonl"
    write_lines(source, [Line(str(number), tuple(prompt), num_new) for number, prompt in enumerate(prompts)])
    with (folder / "bulk.log").open("wb") as log:
        process = subprocess.Popen(batch_command(source, target), stdout=log, stderr=log)
    try:
        yield _BulkRun(process, target)
    finally:
        process.terminate()  # has no effect on a process that has exited
        process.wait()


def _run_urgent(client: Any, prompt: list[int]) -> tuple[float, float]:
    """Run an urgent job. Return its time to first token in milliseconds, and its duration in seconds."""
    started = time.monotonic()
    stream = client.generate("bench", prompt, temperature=0, ignore_eos=True, max_tokens=8).stream(timeout=600)
    next(event for event in stream if event["type"] == "token")
    first = time.monotonic()
    list(stream)
    return (first - started) * 1e3, time.monotonic() - started

"""Compare the cost of very small jobs with the cost of a Celery task that does nothing.

The jobs wait in Redis while the worker is suspended (SIGSTOP), so no other process needs CPU time when the worker
resumes. The time is measured from this moment to the last result. All workers keep running, rounds alternate, and
medians are shown.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from cellama.api import Client
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, cpu_s, redis_cpu_s, serving, wait_until
from cellama.bench.peers.noop import Submit, noop_worker
from cellama.tasks import GenerateParams

MODEL = "bundled://tiny"
POLL_S = 0.005
LOOK = 50  # jobs to check per poll, the oldest unfinished ones
LIKE_OURS, DEFAULTS = "no-op of plain Celery, threads and acks as here", "no-op of plain Celery, its defaults"
TARGETS = ("embed, 1 text", "generate, 1 token")
TEXT = "A short text, number {}"

Queue = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class Way:
    """Jobs of one kind, and the process that runs them."""

    name: str
    pid: int
    queue: Queue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=1500, help="number of jobs per method and round")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="number of engine threads")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--ways", nargs="+", metavar="TEXT", help="measure only jobs whose names contain one of these strings"
    )


def run(args: argparse.Namespace) -> Report:
    source = str(args.model) if args.model else MODEL
    model = {"source": source, "n_parallel": args.slots, "threads": args.threads}
    model |= {"batch_strategy": "adaptive", "ctx_per_slot": 256, "capabilities": ["generate", "embed"]}
    measured: dict[str, list[tuple[float, float, float]]] = {}
    with serving(model) as service, ExitStack() as peers:
        (worker,) = service.processes.values()
        ways = [*_peers(service, args.slots, peers), *_ours(worker.pid, peers.enter_context(Client()))]
        ways = [way for way in ways if any(part in way.name for part in args.ways or [""])]
        for way in ways:  # connections, scripts, threads
            _measure(service.redis, way, 2 * args.slots)
        for _ in range(args.rounds):
            for way in ways:
                measured.setdefault(way.name, []).append(_measure(service.redis, way, args.jobs))
    rows: list[dict[str, Any]] = [{"way": name, **_row(found)} for name, found in measured.items()]
    rates = {name: _row(found)["jobs/s"] for name, found in measured.items()}
    ratios = {
        f"{name} over {peer}": rates[name] / rates[peer]
        for peer in (LIKE_OURS, DEFAULTS)
        if peer in rates
        for name in rates
        if name != peer and name != DEFAULTS
    }
    caveats = ["Worker CPU covers all threads and children of the worker, including the model. Redis CPU is separate."]
    return Report(rows, ratios, {f"{name} over {LIKE_OURS}": ">= 0.8" for name in TARGETS}, caveats)


def _peers(service: Service, threads: int, peers: ExitStack) -> Iterator[Way]:
    """Start the plain Celery workers."""
    for name, number in ((LIKE_OURS, threads), (DEFAULTS, None)):
        process, submit = peers.enter_context(noop_worker(service.folder, service.redis_server.url, threads=number))
        way = Way(name, process.pid, partial(_each, submit))
        _wait_ready(service.redis, way)
        yield way


def _each(submit: Submit, texts: Sequence[str]) -> list[str]:
    return [submit(text) for text in texts]


def _wait_ready(redis: Any, way: Way) -> None:
    """Wait until the worker has finished a job."""
    ids = way.queue([""])
    wait_until(lambda: not _unfinished(redis, ids), way.name)


def _ours(pid: int, client: Client) -> Iterator[Way]:
    def embed(texts: Sequence[str]) -> list[str]:
        return [job.id for job in client.embed_many("bench", texts)]

    def generate(num_new: int, stream: bool, texts: Sequence[str]) -> list[str]:
        params: GenerateParams = {"max_tokens": num_new, "temperature": 0, "ignore_eos": True, "stream": stream}
        return [job.id for job in client.generate_many("bench", texts, **params)]

    yield Way("embed, 1 text", pid, embed)
    for num_new in (1, 16):
        for stream in (False, True):
            name = f"generate, {num_new} token" + "s" * (num_new > 1) + ", stream" * stream
            yield Way(name, pid, partial(generate, num_new, stream))


def _measure(redis: Any, way: Way, num_jobs: int) -> tuple[float, float, float]:
    """Return the jobs per second, and the CPU time per job of the worker and of Redis, in milliseconds."""
    os.kill(way.pid, signal.SIGSTOP)
    try:
        ids = way.queue([TEXT.format(number) for number in range(num_jobs)])
        before, redis_before = cpu_s(way.pid), redis_cpu_s(redis)
        started = time.monotonic()
    finally:
        os.kill(way.pid, signal.SIGCONT)
    while ids := _unfinished(redis, ids):
        if time.monotonic() - started > 300:
            raise RuntimeError(f"{len(ids)} jobs ({way.name}) have not finished")
        time.sleep(POLL_S)
    seconds = time.monotonic() - started
    time.sleep(0.3)  # acks and events that come after the last result
    each = 1e3 / num_jobs
    return num_jobs / seconds, (cpu_s(way.pid) - before) * each, (redis_cpu_s(redis) - redis_before) * each


def _unfinished(redis: Any, ids: list[str]) -> list[str]:
    """Return the unfinished jobs. Jobs finish roughly in order, so only the first jobs are checked."""
    with redis.pipeline(transaction=False) as pipe:
        for job_id in ids[:LOOK]:
            pipe.getrange(f"celery-task-meta-{job_id}", 0, 30)
        states = pipe.execute()
    if b"FAILURE" in b"".join(states):
        raise RuntimeError(f"a job failed: {states}")
    return [job_id for job_id, state in zip(ids, states, strict=False) if b"SUCCESS" not in state] + ids[LOOK:]


def _row(found: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    rates, worker, redis = zip(*found, strict=True)
    return {
        "jobs/s": median(rates),
        "least": min(rates),
        "most": max(rates),
        "worker CPU ms/job": median(worker),
        "Redis CPU ms/job": median(redis),
    }

"""What a deep queue costs: the reaper's commands per look, a purge, and delayed jobs. No worker runs.

The limits are those of a service that nobody notices: a look must cost the same at any depth, a purge must not need
more memory than the jobs that it ends, and no look may keep Redis from serving others for long.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from redis import Redis

from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service

FEW = 10  # jobs: the queue that a deep one is compared with
LEASE_S = 6.0
PAGE = 20_000  # members per pipeline
MODEL = "deep"
A_DAY_S = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=100_000, help="jobs that wait")
    parser.add_argument("--delayed", type=int, default=1_000_000, help="jobs whose time comes tomorrow")
    parser.add_argument("--due", type=int, default=10_000, help="delayed jobs whose time comes at the same moment")


def run(args: argparse.Namespace) -> Report:
    model = {"id": "bench", "source": "bundled://tiny", "default": True}
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [model]) as service:
        few, _ = _look_at(service.redis, FEW)
        deep, look_s = _look_at(service.redis, args.jobs)
        purge = _purge(service.redis)
        service.redis.flushdb()
        delayed_s = _slowest_look_with_delayed(service.redis, args.delayed)
        due_s = _slowest_restore(service.redis, args.due)
    os.environ.pop("CELLAMA_MODELS", None)
    rows = [
        {"what": f"commands per look, {FEW} jobs wait", "figure": few},
        {"what": f"commands per look, {args.jobs} jobs wait", "figure": deep},
        {"what": "seconds of that look", "figure": look_s},
        {"what": "jobs that the purge ended", "figure": purge["ended"]},
        {"what": "seconds of the purge", "figure": purge["seconds"]},
        {"what": f"ms of the slowest look, {args.delayed} jobs delayed", "figure": delayed_s * 1e3},
        {"what": f"ms of the longest script, {args.due} delayed jobs become due", "figure": due_s * 1e3},
    ]
    ratios = {
        "commands per look, deep over few": deep / few,
        "seconds of the purge": purge["seconds"],
        "peak memory of Redis, purge over before": purge["memory"],
        "ms of the slowest look with delayed jobs": max(delayed_s, due_s) * 1e3,
    }
    targets = {
        "commands per look, deep over few": "1",
        "seconds of the purge": "<= 10",
        "peak memory of Redis, purge over before": "<= 1.1",
        "ms of the slowest look with delayed jobs": "<= 50",
    }
    wrong = [] if purge["ended"] == args.jobs + FEW else [f"{args.jobs + FEW} jobs waited, {purge['ended']} ended"]
    caveats = ["times of looks and scripts are those of the caller, its own work and the way to Redis included"]
    return Report(rows, ratios, targets, caveats, wrong)


def _reaper(redis: Redis) -> Any:
    from cellama.tasks import app
    from cellama.tasks.calls.canvas_steps import tell_end
    from cellama.tasks.state.ledger import Ledger
    from cellama.tasks.worker.reaper import Reaper

    return Reaper(redis, Ledger(redis), partial(tell_end, app), LEASE_S)


def _look(redis: Redis, reaper: Any) -> float:
    """Seconds of a look with all its duties."""
    from cellama.tasks.contract.keys import reaper_key

    redis.delete(reaper_key("missing"))
    started = time.monotonic()
    reaper.look()
    return time.monotonic() - started


def _look_at(redis: Redis, num_jobs: int) -> tuple[int, float]:
    """Commands, those of scripts included, and seconds of a look once so many more jobs wait and have settled."""
    from cellama.api import Client
    from cellama.tasks.worker.reaper import SETTLED_S

    with Client() as client:
        client.generate_many(MODEL, [f"prompt {number}" for number in range(num_jobs)], wait=True, max_tokens=16)
    time.sleep(SETTLED_S + 1)  # younger jobs may be on their way into their queue: they are not looked at
    reaper = _reaper(redis)
    _look(redis, reaper)  # so that Redis knows the scripts
    before = _num_calls(redis)
    seconds = _look(redis, reaper)
    return _num_calls(redis) - before, seconds


def _num_calls(redis: Redis) -> int:
    stats: Any = redis.info("commandstats")
    return sum(command["calls"] for command in stats.values())


def _purge(redis: Redis) -> dict[str, float]:
    """Seconds, jobs that ended, and the peak of Redis' memory over that before."""
    from cellama.api import Client

    before: Any = redis.info("memory")
    started = time.monotonic()
    with Client() as client:
        ended = client.purge(MODEL)
    seconds = time.monotonic() - started
    after: Any = redis.info("memory")
    return {"ended": ended, "seconds": seconds, "memory": after["used_memory_peak"] / before["used_memory_peak"]}


def _slowest_look_with_delayed(redis: Redis, num_jobs: int) -> float:
    """Seconds of the slowest look while so many jobs wait for tomorrow. The first one follows a gap without looks."""
    from cellama.tasks.contract.keys import DELAYED_KEY, LOOKED_KEY

    tomorrow = time.time() + A_DAY_S
    for start in range(0, num_jobs, PAGE):
        page = range(start, min(start + PAGE, num_jobs))
        redis.zadd(DELAYED_KEY, {str(uuid.uuid4()): tomorrow + number / 1e3 for number in page})
    reaper = _reaper(redis)
    _look(redis, reaper)
    redis.delete(LOOKED_KEY)
    return max(_look(redis, reaper) for _ in range(20))


def _slowest_restore(redis: Redis, num_jobs: int) -> float:
    """Seconds of the longest script while so many delayed jobs return to their queue."""
    from cellama.api import Client
    from cellama.tasks.contract.keys import DELAYED_KEY, LOOKED_KEY
    from cellama.tasks.contract.names import queue_keys
    from cellama.tasks.state.ledger import MAX_RESTORED
    from cellama.tasks.state.scripts import run_script

    with Client() as client:
        jobs = client.generate_many(MODEL, ["Hi"] * num_jobs, wait=True, max_tokens=16)
    redis.delete(*queue_keys(MODEL))
    now = time.time()
    for start in range(0, num_jobs, PAGE):
        redis.zadd(DELAYED_KEY, {job.id: now - 1 for job in jobs[start : start + PAGE]})
    slowest, num_delayed = 0.0, MAX_RESTORED
    while num_delayed == MAX_RESTORED:
        started = time.monotonic()
        _, num_delayed = run_script(redis, "restore", [LOOKED_KEY], [LEASE_S, MAX_RESTORED])
        slowest = max(slowest, time.monotonic() - started)
    return slowest

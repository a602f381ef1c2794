"""Measure how fast jobs are queued one by one, from threads, in bulk, and with Celery's send_task.

No worker is running. send_task writes a message and a task-sent event. The other methods also check the job and write
its entry. Rounds alternate between the methods so that noise affects all of them equally. Medians are shown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from cellama.bench.harness.report import Report
from cellama.bench.harness.service import serving

MODEL = "none"
SEND_TASK, DELAY, BULK = "send_task of plain Celery", "generate.delay", "generate_many"
PARAMS: dict[str, Any] = {"max_tokens": 16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=5000, help="number of jobs per method and round")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chars", type=int, default=100, help="number of characters per prompt")


def run(args: argparse.Namespace) -> Report:
    prompts = [f"{number} ".ljust(args.chars, "x") for number in range(args.jobs)]
    with serving({"source": "bundled://tiny"}, workers=0) as service:
        ways = _ways(args.threads)
        for way in ways.values():  # connections, scripts, declarations
            way(prompts[:10])
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                service.redis.flushdb()
                rates[name].append(len(prompts) / _seconds(way, prompts))
    middle = {name: median(found) for name, found in rates.items()}
    rows = [
        {"way": name, "jobs/s": middle[name], "least": min(found), "most": max(found)} for name, found in rates.items()
    ]
    ratios = {
        "one by one, jobs/s": middle[DELAY],
        "bulk, jobs/s": middle[BULK],
        "one by one over send_task": middle[DELAY] / middle[SEND_TASK],
        "bulk over send_task": middle[BULK] / middle[SEND_TASK],
    }
    targets = {"one by one, jobs/s": ">= 2500", "bulk, jobs/s": ">= 16000"}
    return Report(rows, ratios, targets, ["The producer and Redis share this machine's cores."])


def _ways(num_threads: int) -> dict[str, Callable[[list[str]], None]]:
    from celery import Celery

    from cellama.api import Client
    from cellama.tasks import app, generate

    plain = Celery(broker=app.conf.broker_url, backend=app.conf.broker_url)
    plain.conf.task_send_sent_event = True
    client = Client()

    def send_task(prompts: list[str]) -> None:
        for prompt in prompts:
            plain.send_task("cellama.generate", ["bench", prompt], PARAMS, queue="cellama:queue:bench", priority=3)

    def delay(prompts: list[str]) -> None:
        for prompt in prompts:
            generate.delay("bench", prompt, **PARAMS)

    def threads(prompts: list[str]) -> None:
        parts = [prompts[number::num_threads] for number in range(num_threads)]
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(delay, parts))

    def bulk(prompts: list[str]) -> None:
        client.generate_many("bench", prompts, wait=True, **PARAMS)

    return {SEND_TASK: send_task, DELAY: delay, f"{DELAY}, {num_threads} threads": threads, BULK: bulk}


def _seconds(way: Callable[[list[str]], None], prompts: list[str]) -> float:
    started = time.monotonic()
    way(prompts)
    return time.monotonic() - started

"""Measure how long a small tenant's jobs wait while a large tenant has queued 100 times as many jobs.

Both tenants share two workers. For comparison, the small tenant's jobs also run alone on one worker, which is the
tenant's share. All jobs are equal, and steps have a minimum duration, so that waits depend on the order of the jobs and
not on the machine. Waits are measured from the call until the job gets a slot.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from cellama.bench.harness.engines import percentile, random_prompts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, serving, wait_until

MODEL = "bundled tiny"
SMALL, LARGE = "small", "large"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=100, help="number of jobs that the small tenant sends")
    parser.add_argument(
        "--times", type=int, default=100, help="number of jobs that the large tenant sends per job of the small tenant"
    )
    parser.add_argument("--slots", type=int, default=4, help="number of slots per worker")
    parser.add_argument("--prompt", type=int, default=16, help="number of prompt tokens per job")
    parser.add_argument("--new", type=int, default=32, help="number of tokens to generate per job")
    parser.add_argument("--pace", type=float, default=0.02, help="minimum duration of a step in seconds")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    rows = [_measure(args, workers=1, num_large=0), _measure(args, workers=2, num_large=args.times * args.jobs)]
    alone, together = rows
    ratios = {
        "median wait over that alone on its share": together["median wait s"] / alone["median wait s"],
        "Jain's index of the service": together["Jain's index"],
    }
    targets = {"median wait over that alone on its share": "<= 1.25", "Jain's index of the service": ">= 0.98"}
    caveats = ["The service is the number of sampled tokens from the first call to the last end of the small tenant."]
    return Report(rows, ratios, targets, caveats)


def _measure(args: argparse.Namespace, *, workers: int, num_large: int) -> dict[str, Any]:
    model = {"source": "bundled://tiny", "n_parallel": args.slots, "threads": 1}
    with serving(model, workers=workers) as service, service.slowed(args.pace):
        from cellama.api import Client

        with Client() as client:
            _queue(client, args, num_large, LARGE)
            if num_large:
                wait_until(lambda: client.stats()["slots_busy"] == workers * args.slots, "busy slots")
            sampled = service.num_sampled()
            jobs = _queue(client, args, args.jobs, SMALL)
            results = [job.result(timeout=3600) for job in jobs]
            sampled = service.num_sampled() - sampled
            num_waiting = client.stats()["waiting"]["bench"]
        _discard(service)
    if num_large and not num_waiting:
        raise RuntimeError("the large tenant had no waiting jobs at the end; increase --times")
    waits = [result["timings"]["queue_ms"] / 1e3 for result in results]
    small = args.jobs * args.new
    return {
        "tenant": "small, alone" if not num_large else f"small, with {num_large} other jobs",
        "workers": workers,
        "jobs": args.jobs,
        "median wait s": median(waits),
        "p95 wait s": percentile(waits, 0.95),
        "tokens": small,
        "tokens of the large tenant": sampled - small,
        "Jain's index": _jain([small, sampled - small]) if num_large else 1.0,
    }


def _queue(client: Any, args: argparse.Namespace, count: int, tenant: str) -> list[Any]:
    prompts = random_prompts(count, args.prompt, seed=args.seed + len(tenant)) if count else []
    options = {"max_tokens": args.new, "temperature": 0, "ignore_eos": True, "fairness_key": tenant}
    return list(client.generate_many("bench", prompts, **options)) if prompts else []


def _discard(service: Service) -> None:
    """Kill the workers, so that the remaining jobs of the large tenant don't run."""
    for name in service.processes:
        service.kill(name)


def _jain(service: Sequence[float]) -> float:
    """Return Jain's fairness index, which is 1 for equal service."""
    return sum(service) ** 2 / (len(service) * sum(each * each for each in service))

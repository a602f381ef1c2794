"""Simulate a fleet with the real scripts of the ledger in virtual time, with the same result on every machine.

Each fair run has random tenants, weights, workers and jobs. It measures how much the weighted services of two tenants
that both have waiting jobs differ, relative to VTC's bound.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass
from typing import Any

from cellama.bench.harness.fleet import Fleet, FleetJob, FleetShape, ServiceGaps
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import serving
from cellama.bench.harness.traces import Session, single_requests
from cellama.config import get_settings
from cellama.tasks.state.fair_shares import set_weight

MODEL = "simulated 174M Q8_0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=1000, help="number of fair runs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run")


def run(args: argparse.Namespace) -> Report:
    with serving({"source": "bundled://tiny"}, workers=0) as service:
        gaps = [fair_run(service.redis, args.seed + number) for number in range(args.runs)]
    shares = sorted(gap.largest / gap.bound for gap in gaps)
    row: dict[str, Any] = {
        "fair runs": len(gaps),
        "with waiting jobs of two tenants": sum(gap.largest > 0 for gap in gaps),
        "jobs": sum(gap.num_jobs for gap in gaps),
        "median of the bound": statistics.median(shares),
        "p99": shares[int(0.99 * (len(shares) - 1))],
        "largest": shares[-1],
    }
    wrong = [
        f"seed {gap.seed}: {gap.largest:.0f} tokens exceed the bound of {gap.bound:.0f}"
        for gap in gaps
        if gap.largest > gap.bound
    ]
    ratios = {"largest difference of services relative to VTC's bound": shares[-1]}
    return Report([row], ratios, {"largest difference of services relative to VTC's bound": "<= 1"}, wrong=wrong)


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest difference of two tenants' weighted services in a run, and VTC's bound, in tokens.

    The bound is twice the cost of the largest prompt or of all jobs that workers can hold at the same time, whichever
    is larger, divided by the smallest weight (arXiv 2401.00588).
    """

    seed: int
    num_jobs: int
    largest: float
    bound: float


def fair_run(redis: Any, seed: int) -> Gap:
    """Simulate random tenants with random jobs on a few workers."""
    rng = random.Random(seed)
    redis.flushdb()
    shape = FleetShape(
        num_workers=rng.randint(1, 3), num_slots=rng.randint(1, 4), look_ahead=rng.randint(0, 2), max_steps=1
    )
    weights = {f"tenant{number}": rng.choice([1, 1, 2, 3]) for number in range(rng.randint(2, 4))}
    for tenant, weight in weights.items():
        set_weight(redis, tenant, weight)
    sessions = sorted(
        (session for tenant in weights for session in _random_jobs(rng, tenant)), key=lambda session: session.at
    )
    prefill_cost = get_settings().prefill_cost
    gaps = ServiceGaps(weights, prefill_cost)
    slack = rng.choice([1, 2, 4])
    jobs = Fleet(redis, shape, gaps, max_tokens_of=lambda job: job.num_new * slack).run(sessions)

    def cost(job: FleetJob) -> float:
        return prefill_cost * job.num_computed + job.num_new

    num_held = shape.num_workers * (shape.num_slots + shape.look_ahead)
    largest_input = max(prefill_cost * job.num_prompt for job in jobs)
    bound = 2 * max(largest_input, num_held * max(map(cost, jobs))) / min(weights.values())
    return Gap(seed, len(jobs), gaps.largest, bound)


def _random_jobs(rng: random.Random, tenant: str) -> list[Session]:
    """Return jobs of a tenant that arrive in bursts or one by one."""
    max_prompt, max_new = rng.choice([50, 400, 1500]), rng.choice([5, 20, 60])

    def lengths(rng: random.Random) -> tuple[int, int]:
        return rng.randint(1, max_prompt), rng.randint(1, max_new)

    found = single_requests(lengths, rng.randint(10, 40), rng.choice([2.0, 20.0, 1000.0]), rng.randrange(1 << 30))
    starts_at = rng.choice([0.0, 0.0, 1.0])
    return [Session(starts_at + session.at, session.turns, tenant) for session in found]

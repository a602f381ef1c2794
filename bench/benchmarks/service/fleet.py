"""Simulate a fleet in virtual time with the ledger's real scripts. The results are the same on every machine.

Each fairness run has random tenants, weights, workers and jobs. Each run measures the difference in weighted service
between two tenants with waiting jobs, relative to VTC's bound.

Other runs compare workers that prefer jobs whose prefix they hold with workers that take jobs in order. The requests in
these runs resemble Mooncake's conversation trace or Azure's traces, which share no prefixes (harness/traces.py). At a
load of 1, as many prompt tokens arrive per second as the workers can prefill. The rate counts the tokens of requests
that ended before the last session started.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cellama.bench.harness.engines import percentile
from cellama.bench.harness.fleet import BlockCache, Fleet, FleetJob, FleetShape, ServiceGaps, num_computed
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import serving
from cellama.bench.harness.traces import (
    Session,
    azure_code,
    azure_conversation,
    conversations,
    families,
    single_requests,
)
from cellama.config import get_settings
from cellama.tasks.state.fair_shares import set_weight

MODEL = "simulated 174M Q8_0"
MEAN_PROMPT = {"conversation": 12_035, "azure conversation": 1500, "azure code": 2200}  # tokens
FAMILIES = "families"  # requests that all arrive at the start, for two workers
PROGRESS = 100  # fairness runs after which the number of finished runs is printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=1000, help="number of simulated fairness runs")
    parser.add_argument("--traces", nargs="*", choices=[*MEAN_PROMPT, FAMILIES], default=[*MEAN_PROMPT, FAMILIES])
    parser.add_argument("--loads", nargs="+", type=float, default=[0.5, 0.8, 1.0, 1.5])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run")


def run(args: argparse.Namespace) -> Report:
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    wrong: list[str] = []
    with serving({"source": "bundled://tiny"}, workers=0) as service:
        if args.runs:
            gaps = []
            for number in range(args.runs):
                gaps.append(fair_run(service.redis, args.seed + number))
                if len(gaps) % PROGRESS == 0:
                    print(f"{len(gaps)} of {args.runs} fairness runs", flush=True)
            rows.append(_row_of(gaps))
            ratios[GAP] = rows[0]["largest"]
            wrong = [f"seed {gap.seed}: {gap.share:.2f} of the bound" for gap in gaps if gap.share > 1]
        shape = FleetShape(num_workers=args.workers)
        for trace in args.traces:
            for load in args.loads if trace != FAMILIES else [0.0]:
                pair = [_measure(service.redis, shape, args, trace, load, is_near) for is_near in (False, True)]
                print(f"{trace}, load {load:g}: simulated with and without affinity", flush=True)
                rows += pair
                ratios |= _ratios(trace, load, *pair)
    targets = {name: target for name in ratios for part, target in TARGETS.items() if name.endswith(part)}
    return Report(rows, ratios, targets, wrong=wrong)


GAP = "largest difference of services relative to VTC's bound"
SHARED, RATE, FIRST, UNSHARED = "computed tokens", "rate", "first token p90", "rate without shared prefixes"
TARGETS = {GAP: "<= 1", SHARED: "<= 1.15 of one shared cache", RATE: ">= 1.8", FIRST: "<= 0.3", UNSHARED: ">= 0.98"}


# Fairness


@dataclass(frozen=True, slots=True)
class Gap:
    """The largest difference in weighted service between two tenants in a run, and VTC's bound, in tokens.

    The bound is twice the cost of the largest prompt or of all jobs that workers can hold at the same time, whichever
    is larger, divided by the smallest weight (arXiv 2401.00588).
    """

    seed: int
    num_jobs: int
    largest: float
    bound: float

    @property
    def share(self) -> float:
        return self.largest / self.bound


def _row_of(gaps: Sequence[Gap]) -> dict[str, Any]:
    shares = sorted(gap.share for gap in gaps)
    return {
        "fair runs": len(gaps),
        "with waiting jobs of two tenants": sum(gap.largest > 0 for gap in gaps),
        "jobs": sum(gap.num_jobs for gap in gaps),
        "median of the bound": statistics.median(shares),
        "p99": percentile(shares, 0.99),
        "largest": shares[-1],
    }


def fair_run(redis: Any, seed: int, *, has_affinity: bool = False) -> Gap:
    """Simulate random tenants that run random jobs on a few workers."""
    rng = random.Random(seed)
    redis.flushdb()
    shape = FleetShape(
        num_workers=rng.randint(1, 3),
        num_slots=rng.randint(1, 4),
        look_ahead=rng.randint(0, 2),
        has_affinity=has_affinity,
        max_steps=1,
    )
    weights = {f"tenant{number}": rng.choice([1, 1, 2, 3]) for number in range(rng.randint(2, 4))}
    for tenant, weight in weights.items():
        set_weight(redis, tenant, weight)
    sessions = [session for tenant in weights for session in _random_jobs(rng, tenant)]
    sessions.sort(key=lambda session: session.at)
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
    """Return a tenant's jobs, which arrive in bursts or one by one."""
    max_prompt, max_new = rng.choice([50, 400, 1500]), rng.choice([5, 20, 60])

    def lengths(rng: random.Random) -> tuple[int, int]:
        return rng.randint(1, max_prompt), rng.randint(1, max_new)

    found = single_requests(lengths, rng.randint(10, 40), rng.choice([2.0, 20.0, 1000.0]), rng.randrange(1 << 30))
    starts_at = rng.choice([0.0, 0.0, 1.0])
    return [Session(starts_at + session.at, session.turns, tenant) for session in found]


# Affinity


def _measure(
    redis: Any, shape: FleetShape, args: argparse.Namespace, trace: str, load: float, has_affinity: bool
) -> dict[str, Any]:
    redis.flushdb()
    shape = replace(shape, has_affinity=has_affinity)
    if trace == FAMILIES:
        shape = replace(shape, num_workers=2, cache_tokens=24 * 1024 + shape.num_slots * 512)
        sessions = families(args.requests // 4, 40, 1024, 100, 32, args.seed)
    else:
        per_s = load * shape.num_workers * 1e3 / shape.costs.prompt_row_ms / MEAN_PROMPT[trace]
        sessions = TRACES[trace](args.requests, per_s, args.seed)
    jobs = Fleet(redis, shape).run(sessions)
    one_cache = BlockCache(shape.cache_tokens * shape.num_workers)
    num_prompt = sum(job.num_prompt for job in jobs)
    until = max(session.at for session in sessions) or max(job.ended_at for job in jobs)
    num_done = sum(job.num_prompt + job.num_new for job in jobs if job.ended_at <= until)
    first_s = sorted(job.first_token_at - job.submitted_at for job in jobs)
    return {
        "trace": trace,
        "load": load,
        "order": "affinity" if has_affinity else "in order",
        "computed": sum(job.num_computed for job in jobs) / num_prompt,
        "with one cache": sum(num_computed(job, one_cache) for job in jobs) / num_prompt,
        "tokens/s": num_done / until,
        "first token p50 s": statistics.median(first_s),
        "first token p90 s": percentile(first_s, 0.9),
    }


TRACES: dict[str, Callable[[int, float, int], list[Session]]] = {
    "conversation": conversations,
    "azure conversation": lambda *args: single_requests(azure_conversation, *args),
    "azure code": lambda *args: single_requests(azure_code, *args),
}


def _ratios(trace: str, load: float, in_order: dict[str, Any], near: dict[str, Any]) -> dict[str, float]:
    rate = near["tokens/s"] / in_order["tokens/s"]
    name = trace if trace == FAMILIES else f"{trace} at load {load:g}"
    if trace not in ("conversation", FAMILIES):
        return {f"{name}: {UNSHARED}": rate}
    return {
        f"{name}: {SHARED}": near["computed"] / near["with one cache"],
        f"{name}: {RATE}": rate,
        f"{name}: {FIRST}": near["first token p90 s"] / in_order["first token p90 s"],
    }

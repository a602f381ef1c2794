"""Compare `Client.position`'s estimates for jobs of mixed lengths on two workers with the jobs' actual waits.

Jobs arrive in bursts, and the position is read right after each job is queued. Jobs that get no estimate because there
is no history are counted separately. Waits are measured with Redis's clock, from the call until the job gets a slot.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from cellama.bench.harness.engines import model_path, percentile, random_prompts
from cellama.bench.harness.pace import STRATEGY
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import serving, wait_until

FACTOR = 1.5
LONG_S = 3.0  # shorter waits are counted separately, because each range includes a second of handling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--burst", type=int, default=50, help="number of jobs per burst")
    parser.add_argument("--left", type=int, default=10, help="number of waiting jobs below which the next burst starts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64, help="maximum number of prompt tokens")
    parser.add_argument(
        "--new", type=int, nargs=2, default=(8, 128), help="minimum and maximum number of tokens to generate"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--pace", type=float, default=0.0, help="minimum duration of a step in seconds, for small models"
    )
    parser.add_argument("--seed", type=int, default=0)


@dataclass(frozen=True)
class EstimatedJob:
    """The estimate for a job, the job's actual wait after the estimate, and the duration of the `position` call."""

    said: Any
    waited_s: float
    question_s: float

    @property
    def is_within(self) -> bool:
        return bool(self.said.eta_least_s <= self.waited_s <= self.said.eta_most_s)

    @property
    def is_near(self) -> bool:
        return bool(1 / FACTOR <= max(self.said.eta_s, 0.1) / max(self.waited_s, 0.1) <= FACTOR)


def run(args: argparse.Namespace) -> Report:
    model = {"source": str(model_path(args.model)), "n_parallel": args.slots, "threads": args.threads}
    model |= {"capabilities": ["generate"], "ctx_per_slot": 1024, "batch_strategy": STRATEGY}
    with serving(model, workers=args.workers) as service:
        from cellama.api import Client

        with service.slowed(args.pace), Client() as client:
            found = _measure(client, args)
    told = [one for one in found if one.said.eta_s is not None]
    rows = [_row(name, some) for name, some in _groups(told) if some]
    ratios = {
        "within the range": mean(one.is_within for one in told),
        f"within a factor of {FACTOR}": mean(one.is_near for one in told),
        "width of the range over the wait": sum(map(_width, told)) / max(1e-9, sum(one.waited_s for one in told)),
        "ms to ask, median": median(one.question_s for one in found) * 1e3,
        "jobs of which nothing was known": float(len(found) - len(told)),
    }
    return Report(rows, ratios, {"within the range": ">= 0.8"})


def _groups(told: Sequence[EstimatedJob]) -> Iterable[tuple[str, list[EstimatedJob]]]:
    yield "all", list(told)
    yield "from finished jobs", [one for one in told if one.said.learnt_from]
    yield "from the speed", [one for one in told if not one.said.learnt_from]
    yield f"waits above {LONG_S:g} s", [one for one in told if one.waited_s > LONG_S]


def _row(name: str, told: Sequence[EstimatedJob]) -> dict[str, Any]:
    return {
        "estimates": name,
        "jobs": len(told),
        "within the range": mean(one.is_within for one in told),
        f"within factor {FACTOR}": mean(one.is_near for one in told),
        "told over real, median": median(max(one.said.eta_s, 0.1) / max(one.waited_s, 0.1) for one in told),
        "wait s, median": median(one.waited_s for one in told),
        "wait s, p95": percentile([one.waited_s for one in told], 0.95),
        "width s, median": median(map(_width, told)),
    }


def _width(one: EstimatedJob) -> float:
    return float(one.said.eta_most_s - one.said.eta_least_s)


def _measure(client: Any, args: argparse.Namespace) -> list[EstimatedJob]:
    chance = random.Random(args.seed)
    asked: list[tuple[Any, Any, float, float]] = []
    while len(asked) < args.jobs:
        prompts = random_prompts(min(args.burst, args.jobs - len(asked)), args.prompt, seed=args.seed + len(asked))
        for prompt in prompts:
            new = round(args.new[0] * (args.new[1] / args.new[0]) ** chance.random())
            length = chance.randint(1, args.prompt)
            submitted = time.monotonic()
            job = client.generate("bench", prompt[:length], max_tokens=new, ignore_eos=chance.random() < 0.7)
            begun = time.monotonic()
            asked.append((job, job.position(), begun - submitted, time.monotonic() - begun))
        wait_until(lambda: client.stats()["waiting"]["bench"] <= args.left, "few waiting jobs")
    found = []
    for job, said, before_s, question_s in asked:
        waited_s = job.result(timeout=3600)["timings"]["queue_ms"] / 1e3
        if said.state == "waiting":
            found.append(EstimatedJob(said, max(0.0, waited_s - before_s), question_s))
    return found

"""Jobs without a slot, by model and class: how many, since when the oldest waits, when a new one would get a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from cellama.tasks.connection.redis_clock import seconds_of
from cellama.tasks.contract.keys import PRIORITY_WEIGHT, waiting_key
from cellama.tasks.contract.names import CLASSES, PRIORITIES, queue_name
from cellama.tasks.state.registry import WorkerEntry

from .position import Job, estimate


@dataclass(frozen=True, slots=True)
class Waiting:
    """Those of a class; with none the oldest has waited for 0 s."""

    num_jobs: int
    oldest_s: float


def waiting_by_class(redis: Redis, models: Iterable[str]) -> dict[str, dict[str, Waiting]]:
    """By model, and in it by class, all by one look at Redis' clock. Raises RedisError."""
    named, pipeline = list(models), redis.pipeline(transaction=False)
    pipeline.time()
    for model in named:
        key = waiting_key(queue_name(model))
        for priority in PRIORITIES:
            least, below = priority * PRIORITY_WEIGHT, f"({(priority + 1) * PRIORITY_WEIGHT:.0f}"
            pipeline.zcount(key, least, below)
            pipeline.zrangebyscore(key, least, below, start=0, num=1, withscores=True)
    time, *found = pipeline.execute()
    now, answers = seconds_of(time), iter(found)
    told = {model: {priority: (next(answers), next(answers)) for priority in PRIORITIES} for model in named}
    return {
        model: {name: _class([(p, *by_priority[p]) for p in priorities], now) for name, priorities in CLASSES.items()}
        for model, by_priority in told.items()
    }


def _class(told: Sequence[tuple[int, int, Any]], now: float) -> Waiting:
    """Of priorities, their numbers of jobs and their first ones, which are their oldest."""
    ages_s = [now - (first[0][1] - priority * PRIORITY_WEIGHT) for priority, _, first in told if first]
    return Waiting(sum(count for _, count, _ in told), max([0.0, *ages_s]))


def eta_by_class(
    redis: Redis, workers: Sequence[WorkerEntry], running: Sequence[Job], model: str, waiting: Mapping[str, Waiting]
) -> dict[str, float | None]:
    """Seconds until a new job of each class would get a slot; None where no worker serves it, or nothing is known yet.

    Raises RedisError.
    """
    ahead, etas = 0, {}
    for name, priorities in CLASSES.items():
        ahead += waiting[name].num_jobs
        found = estimate(redis, workers, running, queue_name(model), ahead, priorities[-1])
        etas[name] = None if found is None or found[0] is None else found[0].eta_s
    return etas

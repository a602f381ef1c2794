"""Jobs without a slot by model and class: their number, the age of the oldest, and when a new job would get a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from redis import Redis

from cellama.tasks.connection.redis_clock import seconds_of
from cellama.tasks.contract.keys import PRIORITY_WEIGHT, waiting_key
from cellama.tasks.contract.names import CLASSES, queue_name
from cellama.tasks.state.registry import WorkerEntry

from .position import ListedJob, estimate


@dataclass(frozen=True, slots=True)
class Waiting:
    """The waiting jobs of one class. `oldest_s` is the age of the oldest in seconds; 0 if there are none."""

    num_jobs: int
    oldest_s: float


def waiting_by_class(redis: Redis, models: Iterable[str]) -> dict[str, dict[str, Waiting]]:
    """Return the waiting jobs by model and class, all at the same moment of Redis' clock. Raises RedisError."""
    counted, pipeline = [], redis.pipeline(transaction=False)
    pipeline.time()
    for model in models:
        key = waiting_key(queue_name(model))
        for name, priorities in CLASSES.items():
            for priority in priorities:
                least, below = priority * PRIORITY_WEIGHT, f"({(priority + 1) * PRIORITY_WEIGHT:.0f}"
                pipeline.zcount(key, least, below)
                pipeline.zrangebyscore(key, least, below, start=0, num=1, withscores=True)
                counted.append((model, name, least))
    time, *found = pipeline.execute()
    now = seconds_of(time)
    waiting: dict[str, dict[str, Waiting]] = {}
    for (model, name, least), count, first in zip(counted, found[::2], found[1::2], strict=True):
        classes = waiting.setdefault(model, {})
        before = classes.get(name, Waiting(0, 0.0))
        age_s = now - (first[0][1] - least) if first else 0.0  # the first entry of a priority is its oldest
        classes[name] = Waiting(before.num_jobs + count, max(before.oldest_s, age_s))
    return waiting


def eta_by_class(
    redis: Redis,
    workers: Sequence[WorkerEntry],
    running: Sequence[ListedJob],
    model: str,
    waiting: Mapping[str, Waiting],
) -> dict[str, float | None]:
    """Return the seconds until a new job of each class would get a slot.

    None where no worker serves the model, or nothing is known yet about how long such jobs take. Raises RedisError.
    """
    ahead, etas = 0, {}
    for name, priorities in CLASSES.items():
        ahead += waiting[name].num_jobs
        etas[name] = estimate(redis, workers, running, queue_name(model), ahead, priorities[-1]).eta_s
    return etas

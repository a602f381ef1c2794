"""Queues: what waits and runs, by model and class, and since when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from redis import Redis

from cellama.tasks.contract.keys import PRIORITY_WEIGHT, RUNNING_KEY, job_key, waiting_key
from cellama.tasks.contract.names import (
    BULK_PRIORITIES,
    DEFAULT_MODEL,
    PRIORITIES,
    URGENT_PRIORITIES,
    model_of,
    queue_keys,
    queue_name,
)
from cellama.tasks.estimates.position import estimate
from cellama.tasks.metrics.bounded import OTHER
from cellama.tasks.metrics.families import Figures
from cellama.tasks.state.job_list import queued_models
from cellama.tasks.state.registry import WorkerEntry

CLASSES = {"interactive": URGENT_PRIORITIES, "bulk": BULK_PRIORITIES}
MOST_RUNNING = 1000  # jobs that are looked at
MOST_QUEUES = 100
MOST_ESTIMATES = 20  # each looks at some hundreds of jobs


Running = tuple[str, str]  # model and class of a job


def add_queues(redis: Redis, figures: Figures, now: float, workers: Sequence[WorkerEntry]) -> bool:
    """Adds those of `:default`, of models that a worker serves, and of models for which jobs wait or run.

    `now` is Redis' clock. True if there are more than it looks at. Raises RedisError.
    """
    serving = Counter(_served(workers))
    running, truncated = _running(redis)
    others = {*queued_models(redis), *(model for model, _ in running)} - serving.keys() - {DEFAULT_MODEL}
    known = [DEFAULT_MODEL, *sorted(serving.keys() - {DEFAULT_MODEL}), *sorted(others)]
    models = known[:MOST_QUEUES]
    waiting = {model: _add_waiting(redis, figures, model, now) for model in models}
    for model in models:
        figures.add("cellama_queue_workers", serving[model], model)
    _add_running(figures, models, running)
    _add_estimates(redis, figures, workers, waiting)
    return truncated or len(known) > MOST_QUEUES or len(models) > MOST_ESTIMATES


def _add_waiting(redis: Redis, figures: Figures, model: str, now: float) -> int:
    """Its jobs without a slot: how many, and the oldest of each class. A priority's first is its oldest."""
    key, pipeline = waiting_key(queue_name(model)), redis.pipeline(transaction=False)
    for priority in PRIORITIES:
        least, below = priority * PRIORITY_WEIGHT, f"({(priority + 1) * PRIORITY_WEIGHT:.0f}"
        pipeline.zcount(key, least, below)
        pipeline.zrangebyscore(key, least, below, start=0, num=1, withscores=True)
    for list_key in queue_keys(model):
        pipeline.llen(list_key)
    found: list[Any] = pipeline.execute()
    asked, lengths = found[: 2 * len(PRIORITIES)], found[2 * len(PRIORITIES) :]
    counts, firsts = asked[::2], asked[1::2]
    for name, priorities in CLASSES.items():
        figures.add("cellama_jobs_waiting", sum(counts[p] for p in priorities), model, name)
        ages = [now - (firsts[p][0][1] - p * PRIORITY_WEIGHT) for p in priorities if firsts[p]]
        figures.add("cellama_oldest_waiting_seconds", max(0.0, *ages, 0.0), model, name)
    figures.add("celery_queue_length", sum(lengths), queue_name(model))
    return int(sum(counts))


def _add_estimates(redis: Redis, figures: Figures, workers: Sequence[WorkerEntry], waiting: dict[str, int]) -> None:
    for model in sorted(waiting, key=lambda model: -waiting[model])[:MOST_ESTIMATES]:
        found = estimate(redis, workers, queue_name(model), waiting[model], PRIORITIES[-1])
        forecast = None if found is None else found[0]
        if forecast is not None:
            figures.add("cellama_queue_eta_seconds", forecast.eta_s, model)


def _running(redis: Redis) -> tuple[list[Running], bool]:
    """Jobs that have a slot; and True if there are more than it looks at."""
    ids: Any = redis.zrange(RUNNING_KEY, 0, MOST_RUNNING)
    pipeline = redis.pipeline(transaction=False)
    for raw in ids[:MOST_RUNNING]:
        pipeline.hmget(job_key(raw.decode()), "queue", "priority")
    told = [(queue, int(priority or 0)) for queue, priority in pipeline.execute() if queue is not None]
    running = [
        (model_of(queue.decode()), "interactive" if priority in URGENT_PRIORITIES else "bulk")
        for queue, priority in told
    ]
    return running, len(ids) > MOST_RUNNING


def _add_running(figures: Figures, models: Sequence[str], running: Iterable[Running]) -> None:
    for model in models:
        for name in CLASSES:
            figures.add("cellama_jobs_running", 0, model, name)
    for model, name in running:
        figures.add("cellama_jobs_running", 1, model if model in models else OTHER, name)


def _served(workers: Sequence[WorkerEntry]) -> Iterator[str]:
    """Each model as often as a worker has it ready; `:default` too."""
    for worker in workers:
        for model in worker.models:
            if model["status"] == "ready":
                yield model["id"]
                if model["default"]:
                    yield DEFAULT_MODEL

"""Queues: what waits and runs, by model and class, and since when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from redis import Redis

from cellama.tasks.contract.keys import RUNNING_KEY, job_key
from cellama.tasks.contract.names import (
    DEFAULT_MODEL,
    URGENT_PRIORITIES,
    model_of,
    queue_keys,
    queue_name,
)
from cellama.tasks.estimates.waiting import CLASSES, Waiting, eta_by_class, waiting_by_class
from cellama.tasks.metrics.bounded import OTHER
from cellama.tasks.metrics.families import Figures
from cellama.tasks.state.job_list import queued_models
from cellama.tasks.state.registry import WorkerEntry

MOST_RUNNING = 1000  # jobs that are looked at
MOST_QUEUES = 100
MOST_ESTIMATES = 20  # models; each estimate looks at some hundreds of jobs


Running = tuple[str, str]  # model and class of a job


def add_queues(redis: Redis, figures: Figures, workers: Sequence[WorkerEntry]) -> bool:
    """Adds those of `:default`, of models that a worker serves, and of models for which jobs wait or run.

    True if there are more than it looks at. Raises RedisError.
    """
    serving = Counter(_served(workers))
    running, truncated = _running(redis)
    others = {*queued_models(redis), *(model for model, _ in running)} - serving.keys() - {DEFAULT_MODEL}
    known = [DEFAULT_MODEL, *sorted(serving.keys() - {DEFAULT_MODEL}), *sorted(others)]
    models = known[:MOST_QUEUES]
    waiting = waiting_by_class(redis, models)
    _add_waiting(redis, figures, waiting)
    for model in models:
        figures.add("cellama_queue_workers", serving[model], model)
    _add_running(figures, models, running)
    _add_estimates(redis, figures, workers, waiting)
    return truncated or len(known) > MOST_QUEUES or len(models) > MOST_ESTIMATES


def _add_waiting(redis: Redis, figures: Figures, waiting: dict[str, dict[str, Waiting]]) -> None:
    pipeline = redis.pipeline(transaction=False)
    for model in waiting:
        for key in queue_keys(model):
            pipeline.llen(key)
    lengths = iter(pipeline.execute())
    for model, classes in waiting.items():
        figures.add("celery_queue_length", sum(next(lengths) for _ in queue_keys(model)), queue_name(model))
        for name, found in classes.items():
            figures.add("cellama_jobs_waiting", found.num_jobs, model, name)
            figures.add("cellama_oldest_waiting_seconds", found.oldest_s, model, name)


def _add_estimates(
    redis: Redis, figures: Figures, workers: Sequence[WorkerEntry], waiting: dict[str, dict[str, Waiting]]
) -> None:
    """Of the models for which most jobs wait."""
    by_length = sorted(waiting, key=lambda model: -sum(found.num_jobs for found in waiting[model].values()))
    for model in by_length[:MOST_ESTIMATES]:
        for name, eta_s in eta_by_class(redis, workers, model, waiting[model]).items():
            if eta_s is not None:
                figures.add("cellama_queue_eta_seconds", eta_s, model, name)


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

"""Queues: what waits and runs, by model and class, and since when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from redis import Redis

from cellama.tasks.contract.keys import running_key
from cellama.tasks.contract.names import CLASSES, DEFAULT_MODEL, class_of_priority, model_of, queue_keys, queue_name
from cellama.tasks.estimates.position import (
    MAX_RUNNING,
    ListedJob,
    Waiting,
    eta_by_class,
    running_jobs,
    waiting_by_class,
)
from cellama.tasks.metrics.figures import OTHER, Figures
from cellama.tasks.state.job_list import queued_models
from cellama.tasks.state.registry import WorkerEntry

MOST_QUEUES = 100  # models; more would make a scrape large and slow
MOST_ESTIMATES = 20  # models, because an estimate reads hundreds of jobs of each class


def add_queues(redis: Redis, figures: Figures, workers: Sequence[WorkerEntry]) -> bool:
    """Add figures of `:default`, of models that a worker serves, and of models for which jobs wait or run.

    Returns True if there are more than it reads. Raises RedisError.
    """
    serving = Counter(_served(workers))
    running = running_jobs(redis)
    others = {*queued_models(redis), *map(_model, running)} - serving.keys() - {DEFAULT_MODEL}
    known = [DEFAULT_MODEL, *sorted(serving.keys() - {DEFAULT_MODEL}), *sorted(others)]
    models = known[:MOST_QUEUES]
    waiting = waiting_by_class(redis, models)
    _add_waiting(redis, figures, waiting)
    for model in models:
        figures.add("cellama_queue_workers", serving[model], model)
    _add_running(figures, models, running)
    _add_estimates(redis, figures, workers, running, waiting)
    return len(known) > MOST_QUEUES or len(models) > MOST_ESTIMATES or redis.zcard(running_key()) > MAX_RUNNING


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
    redis: Redis,
    figures: Figures,
    workers: Sequence[WorkerEntry],
    running: Sequence[ListedJob],
    waiting: dict[str, dict[str, Waiting]],
) -> None:
    """Add estimates for the models for which most jobs wait."""
    by_length = sorted(waiting, key=lambda model: -sum(found.num_jobs for found in waiting[model].values()))
    for model in by_length[:MOST_ESTIMATES]:
        for name, eta_s in eta_by_class(redis, workers, running, model, waiting[model]).items():
            if eta_s is not None:
                figures.add("cellama_queue_eta_seconds", eta_s, model, name)


def _model(job: ListedJob) -> str:
    return model_of(job.kind.queue)


def _add_running(figures: Figures, models: Sequence[str], running: Sequence[ListedJob]) -> None:
    for model in models:
        for name in CLASSES:
            figures.add("cellama_jobs_running", 0, model, name)
    for job in running:
        model = _model(job) if _model(job) in models else OTHER
        figures.add("cellama_jobs_running", 1, model, class_of_priority(job.priority))


def _served(workers: Sequence[WorkerEntry]) -> Iterator[str]:
    """Yield each model once per worker that has it ready, and `:default` too."""
    for worker in workers:
        for model in worker.models:
            if model["status"] == "ready":
                yield model["id"]
                if model["default"]:
                    yield DEFAULT_MODEL

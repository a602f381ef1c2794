"""List the jobs that have not ended, with their queues and workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from redis import Redis

from cellama.tasks.contract.keys import job_key, queues_key, running_key, waiting_key
from cellama.tasks.contract.names import is_model_queue, model_of, queue_name

_FIELDS = ("state", "task", "queue", "priority", "submitted_at", "attempt", "worker")


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A waiting or running job. `submitted_at` is in Unix seconds, by Redis' clock."""

    job_id: str  # id of the job
    state: Literal["waiting", "running"]
    kind: str  # name of the task without `cellama.`
    model: str  # id of the model
    priority: int  # 0 (most urgent) to 9
    submitted_at: float  # time of submission
    attempts: int  # number of attempts
    worker: str | None  # worker of the last attempt


def open_jobs(redis: Redis, model: str | None, limit: int) -> list[OpenJob]:
    """Return up to `limit` jobs: running jobs, oldest first, then the waiting jobs of each queue in queue order."""
    models = queued_models(redis) if model is None else [model]
    with redis.pipeline() as transaction:  # else a job that starts between two commands could be missing
        transaction.zrange(running_key(), 0, -1 if model else limit - 1)
        for name in models:
            transaction.zrange(waiting_key(queue_name(name)), 0, limit - 1)
        ids: list[bytes] = [raw for found in transaction.execute() for raw in found]
    pipeline = redis.pipeline(transaction=False)
    for raw in ids:
        pipeline.hmget(job_key(raw.decode()), _FIELDS)
    found = (_open(raw.decode(), values) for raw, values in zip(ids, pipeline.execute(), strict=True))
    return [job for job in found if job is not None and model in (None, job.model)][:limit]


def queued_models(redis: Redis) -> list[str]:
    """Return the models for which jobs are waiting or waited recently, even if no worker serves them."""
    queues: Any = redis.smembers(queues_key())
    return sorted(model_of(name) for raw in queues if is_model_queue(name := raw.decode()))


def _open(job_id: str, values: list[bytes | None]) -> OpenJob | None:
    state, task, queue, priority, submitted_at, attempts, worker = (value and value.decode() for value in values)
    if not state or not task or not queue or state == "done":
        return None  # the job has ended in the meantime
    current: Literal["waiting", "running"] = "running" if state == "running" else "waiting"
    kind, model = task.removeprefix("cellama."), model_of(queue)
    return OpenJob(
        job_id, current, kind, model, int(priority or 0), float(submitted_at or 0), int(attempts or 0), worker or None
    )

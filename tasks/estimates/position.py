"""Find a job's position in its queue, and estimate when the job will get a slot.

`forecast` is a pure function that computes when a slot becomes free, from the likely service times of the jobs ahead.
The other functions read these jobs, and the samples of their service times, from Redis.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from redis import Redis

from cellama.tasks.connection.connections import seconds_of
from cellama.tasks.contract.errors import UnknownJob
from cellama.tasks.contract.keys import PRIORITY_WEIGHT, job_key, running_key, waiting_key
from cellama.tasks.contract.names import (
    CLASSES,
    DEFAULT_MODEL,
    PRIORITY_INTERACTIVE,
    model_of,
    queue_name,
    queues_of_model,
)
from cellama.tasks.contract.shapes.workers import WorkerModel
from cellama.tasks.state.ledger import JobsAhead, JobWork, Ledger, work_of_text
from cellama.tasks.state.registry import WorkerEntry, is_served, live_workers

from .samples import JobClass, Samples, class_of, read_samples

# Standard deviations between the estimate and each end of its range. In the simulation of test_forecast.py, the range
# contains at least 82 % of the waits in each case. With 1.4 deviations it contains 74 % in the worst case.
NUM_DEVIATIONS = 1.7
SPEED_DEVIATION = 0.15  # fraction of the estimate; heartbeats report the speed of a single second, which varies
ASSUMED_DEVIATION = 0.5  # fraction of the estimate while there are no samples, so that lengths are assumed
HANDLING_S = 1.0  # additional seconds that queue, worker and engine may need
MAX_AHEAD = 200  # jobs ahead that are read; a sample of more errs by about 7 % if lengths vary as much as their mean
MAX_RUNNING = 2000  # running jobs that are read, those of several hundred workers
ASSUMED_LENGTHS = (0.1, 0.3, 0.6, 0.9, 1.0)  # fractions of the requested tokens, while there are no samples
MAX_LOADS = 5  # load times until a model is loaded at the latest, if the worker must first stop a busy model
TEXT_SLOTS = 16  # concurrent jobs of a model without an engine


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """A job's slot time in slot-seconds, as mean and variance, spread over `num_slots` concurrent slots."""

    mean_s: float
    variance: float
    num_slots: int = 1


@dataclass(frozen=True, slots=True)
class WaitEstimate:
    """Seconds until a job gets a slot: an estimate, a range, and the number of samples that the estimate is based on.

    `eta_s` and `max_s` are None if the service time of similar jobs is unknown.
    """

    eta_s: float | None = None
    min_s: float = 0.0
    max_s: float | None = None
    num_samples: int = 0


def service_time(seconds: Sequence[float], elapsed_s: float = 0.0, num_slots: int = 1) -> ServiceTime:
    """Return a job's remaining time after `elapsed_s`, given total times in `seconds` that are all equally likely.

    A job that has already taken longer than all of these times is assumed to need 10% of `elapsed_s` more.
    """
    remaining = [each - elapsed_s for each in seconds if each > elapsed_s] or [0.1 * elapsed_s]
    mean_s = sum(remaining) / len(remaining)
    return ServiceTime(mean_s, sum((each - mean_s) ** 2 for each in remaining) / len(remaining), num_slots)


def forecast(
    num_slots: int,
    running: Sequence[ServiceTime],
    ahead: Sequence[ServiceTime],
    num_ahead: int,
    num_samples: int = 0,
) -> WaitEstimate:
    """Estimate when a job behind all these jobs will get a slot.

    Each job is assumed to take its mean time in the slot that becomes free first. `ahead` contains the `num_ahead`
    waiting jobs that get a slot earlier, or an even sample of them.
    """
    free_at = sorted(job.mean_s / job.num_slots for job in running for _ in range(job.num_slots))[-num_slots:]
    free_at = [0.0] * (num_slots - len(free_at)) + free_at
    for job in ahead:
        for _ in range(job.num_slots):
            heapq.heapreplace(free_at, free_at[0] + job.mean_s / job.num_slots)
    num_omitted = num_ahead / len(ahead) - 1 if ahead else 0.0  # omitted jobs per job of the sample
    eta_s = free_at[0] + num_omitted * sum(job.mean_s for job in ahead) / num_slots
    if not eta_s:
        return WaitEstimate(0.0, min_s=0.0, max_s=HANDLING_S, num_samples=num_samples)
    variance = sum(job.variance for job in running) + (1 + num_omitted) * sum(job.variance for job in ahead)
    relative = SPEED_DEVIATION if num_samples else ASSUMED_DEVIATION
    spread_s = NUM_DEVIATIONS * math.hypot(math.sqrt(variance) / num_slots, relative * eta_s) + HANDLING_S
    return WaitEstimate(eta_s, min_s=max(0.0, eta_s - spread_s), max_s=eta_s + spread_s, num_samples=num_samples)


JobState = Literal["waiting", "running", "done"]


@dataclass(frozen=True, slots=True)
class Position:
    """A job's position in its queue, and an estimate of the job's wait.

    In at least 80% of cases, the actual wait lies between `eta_least_s` and `eta_most_s`. `eta_s` and `eta_most_s` are
    None if no worker serves the model, or while the duration of similar jobs is unknown.
    """

    job_id: str  # id of the job
    state: JobState  # state of the job
    ahead: int = 0  # number of jobs that get a slot before this job
    eta_s: float | None = 0.0  # estimated seconds until the job gets a slot
    finish_reason: str | None = None  # finish reason of a finished job
    error: str | None = None  # message of a failed job
    eta_least_s: float = 0.0  # lower end of the range of the estimate
    eta_most_s: float | None = 0.0  # upper end of this range
    learnt_from: int = 0  # number of finished jobs that the range is based on; 0 if it is based on assumptions
    served: bool = True  # whether a worker serves the model


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A job that is waiting, or has been running on `worker` for `elapsed_s` seconds."""

    kind: JobClass
    work: JobWork
    priority: int
    worker: str = ""
    elapsed_s: float = 0.0
    fairness_key: str = ""


def position_of(redis: Redis, job_id: str) -> Position:
    """Return the position of a job. Raises UnknownJob."""
    ledger = Ledger(redis)
    state, ahead = ledger.state(job_id), ledger.ahead(job_id)
    if state is None:
        raise UnknownJob(
            f"job {job_id} is unknown or has expired; a job sent by plain Celery is unknown until a worker takes it"
        )
    if state == "done":
        ending = ledger.ending(job_id)
        event = None if ending is None else ending.event
        if event is not None and event["type"] == "error":
            return Position(job_id, "done", finish_reason="error", error=event["message"])
        return Position(job_id, "done", finish_reason=None if event is None else event["finish_reason"])
    queue = ledger.queue(job_id) or ""
    workers = live_workers(redis)
    served = bool(serving_models(workers, queue))
    if ahead is None:
        eta = 0.0 if state == "running" else None
        return Position(job_id, "waiting" if eta is None else "running", eta_s=eta, eta_most_s=eta, served=served)
    raw: Any = redis.hget(job_key(job_id), "priority")
    found = estimate(redis, workers, running_jobs(redis), queue, ahead, int(raw or PRIORITY_INTERACTIVE))
    return Position(
        job_id,
        "waiting",
        ahead=ahead.num_jobs,
        eta_s=None if found.eta_s is None else round(found.eta_s, 3),
        eta_least_s=round(found.min_s, 3),
        eta_most_s=None if found.max_s is None else round(found.max_s, 3),
        learnt_from=found.num_samples,
        served=served,
    )


def estimate(
    redis: Redis,
    workers: Sequence[WorkerEntry],
    running_now: Sequence[ListedJob],
    queue: str,
    ahead: JobsAhead,
    priority: int,
) -> WaitEstimate:
    """Estimate when a job with this priority will get a slot behind these jobs. Raises RedisError."""
    serving = serving_models(workers, queue)
    if not serving:
        return WaitEstimate()
    load_s = _load_s(serving)
    if load_s is None:
        return WaitEstimate()
    found = _estimate(redis, serving, running_now, queue, ahead, priority)
    if not load_s or found.eta_s is None or found.max_s is None:
        return found
    return replace(found, eta_s=found.eta_s + load_s, max_s=found.max_s + MAX_LOADS * load_s)


def _load_s(serving: Sequence[tuple[WorkerEntry, WorkerModel]]) -> float | None:
    """Return the seconds until a model is loaded: 0 if it is ready, or None if its load was never measured."""
    if any(model["status"] == "ready" for _, model in serving):
        return 0.0
    return min((model["load_s"] for _, model in serving if "load_s" in model), default=None)


def _estimate(
    redis: Redis,
    serving: Sequence[tuple[WorkerEntry, WorkerModel]],
    running_now: Sequence[ListedJob],
    queue: str,
    ahead: JobsAhead,
    priority: int,
) -> WaitEstimate:
    """Estimate when a job will get a slot after the model has been loaded."""
    num_slots = sum(num_slots_of(model) for _, model in serving)
    names, queues = {worker.name for worker, _ in serving}, _queues_of(serving, queue)
    running = [job for job in running_now if job.kind.queue in queues and job.worker and job.priority <= priority]
    waiting = [job for job in running if job.worker not in names]  # jobs of crashed workers, which restart first
    running = [job for job in running if job.worker in names]
    waiting += first_jobs(redis, queue, ahead)
    if sum(job.work.num_parts for job in (*running, *waiting)) < num_slots:
        return WaitEstimate(0.0, min_s=0.0, max_s=HANDLING_S)
    samples = read_samples(redis, {job.kind for job in (*running, *waiting)})
    speed = speed_of(serving, samples)
    times = [remaining_time(job, samples, speed, num_slots) for job in (*running, *waiting)]
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        return WaitEstimate()
    count = len(running)
    return forecast(num_slots, known[:count], known[count:], max(ahead.num_jobs, len(waiting)), samples.num_samples)


def remaining_time(job: ListedJob, samples: Samples, speed: float | None, num_slots: int) -> ServiceTime | None:
    """Return the remaining service time of a job, or None if neither samples nor a speed is known."""
    seconds = amounts = samples.amounts(job.kind, job.work.num_units)
    if job.work.counts_tokens:
        lengths = (1.0,) if job.work.is_exact else ASSUMED_LENGTHS
        amounts = amounts or [job.work.num_units * length for length in lengths]
        seconds = [amount / speed for amount in amounts] if speed else []
    pieces = min(job.work.num_parts, num_slots)
    return service_time(seconds, job.elapsed_s * pieces, pieces) if seconds else None


def serving_models(workers: Sequence[WorkerEntry], queue: str) -> list[tuple[WorkerEntry, WorkerModel]]:
    """Return the workers that serve a queue, each with the model that serves the queue.

    If no worker has the model, return the workers that load it on demand.
    """
    queue = queue_name(model_of(queue))  # that of the model, if a plain producer named an alias
    is_default = queue == queue_name(DEFAULT_MODEL)
    found = [
        (worker, model)
        for worker in workers
        for model in worker.models
        if is_served(model) and (queue_name(model["id"]) == queue or (is_default and model["default"]))
    ]
    return [(worker, model) for worker, model in found if model["status"] == "ready"] or found


def num_slots_of(model: WorkerModel) -> int:
    """Return how many jobs of a model one worker runs at the same time."""
    if model["engine"] is None:
        return model.get("slots") or TEXT_SLOTS
    return model["engine"]["slots_total"]


def _queues_of(serving: Sequence[tuple[WorkerEntry, WorkerModel]], queue: str) -> set[str]:
    """Return the queues whose jobs use the same slots as the jobs in `queue`."""
    models = {model["id"] for _, model in serving}
    models |= {DEFAULT_MODEL for _, model in serving if model["default"]}
    return {queue, *(each for model in models for each in queues_of_model(model))}


def speed_of(serving: Sequence[tuple[WorkerEntry, WorkerModel]], samples: Samples) -> float | None:
    """Return the speed in tokens per second and slot.

    The speed comes from busy engines or, if all engines are idle, from the latest jobs.
    """
    engines = [model["engine"] for _, model in serving if model["engine"] is not None]
    num_decoding = sum(engine["slots_decoding"] for engine in engines)
    rate = sum(engine["generation_rate"] for engine in engines)
    if not engines:  # the work of these models is counted in seconds
        return 1.0
    return rate / num_decoding if num_decoding and rate > 0 else samples.speed


def running_jobs(redis: Redis) -> list[ListedJob]:
    """Return up to MAX_RUNNING running jobs. Raises RedisError."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.time()
    pipeline.zrange(running_key(), 0, MAX_RUNNING - 1, withscores=True)
    time, entries = pipeline.execute()
    since = {raw.decode(): seconds_of(time) - score for raw, score in entries}
    return [replace(job, elapsed_s=max(0.0, since[job_id])) for job_id, job in _jobs(redis, list(since))]


def first_jobs(redis: Redis, queue: str, ahead: JobsAhead) -> list[ListedJob]:
    """Return the jobs ahead of a job, or an even sample of up to about MAX_AHEAD of them."""
    step, num_first = -(-ahead.num_jobs // MAX_AHEAD) or 1, ahead.num_first
    ranks = [(0, num_first - 1)] if step == 1 else [(rank, rank) for rank in range(0, num_first, step)]
    pipeline = redis.pipeline(transaction=False)
    for first, last in ranks if num_first else ():
        pipeline.zrange(waiting_key(queue), first, last)
    ids = [raw.decode() for found in pipeline.execute() for raw in found]
    for job_id, count in ahead.of_keys:
        ids += [job_id] * round(count / step)
    return [replace(job, worker="") for _, job in _jobs(redis, ids)]


def _jobs(redis: Redis, job_ids: Sequence[str]) -> Iterator[tuple[str, ListedJob]]:
    pipeline = redis.pipeline(transaction=False)
    for job_id in job_ids:
        pipeline.hmget(job_key(job_id), "queue", "work", "priority", "worker", "fairness_key")
    for job_id, found in zip(job_ids, pipeline.execute(), strict=True):
        queue, work, priority, worker, fairness_key = ((value or b"").decode() for value in found)
        if queue:
            job_work, job_priority = work_of_text(work), int(priority or PRIORITY_INTERACTIVE)
            kind = class_of(queue, job_work, job_priority)
            yield (
                job_id,
                ListedJob(
                    kind,
                    work=job_work,
                    priority=job_priority,
                    worker=worker.partition(" ")[0],
                    fairness_key=fairness_key,
                ),
            )


@dataclass(frozen=True, slots=True)
class Waiting:
    """The waiting jobs of one class. `oldest_s` is the age of the oldest job in seconds, or 0 if no job is waiting."""

    num_jobs: int
    oldest_s: float


def waiting_by_class(redis: Redis, models: Iterable[str]) -> dict[str, dict[str, Waiting]]:
    """Return the waiting jobs by model and class, all counted at the same point in time. Raises RedisError."""
    counted, pipeline = [], redis.pipeline(transaction=False)
    pipeline.time()
    for model in models:
        key = waiting_key(queue_name(model))
        for name, priorities in CLASSES.items():
            for priority in priorities:
                min_score, end_score = priority * PRIORITY_WEIGHT, f"({(priority + 1) * PRIORITY_WEIGHT:.0f}"
                pipeline.zcount(key, min_score, end_score)
                pipeline.zrangebyscore(key, min_score, end_score, start=0, num=1, withscores=True)
                counted.append((model, name, min_score))
    time, *found = pipeline.execute()
    now = seconds_of(time)
    waiting: dict[str, dict[str, Waiting]] = {}
    for (model, name, min_score), count, first in zip(counted, found[::2], found[1::2], strict=True):
        classes = waiting.setdefault(model, {})
        before = classes.get(name, Waiting(0, 0.0))
        age_s = now - (first[0][1] - min_score) if first else 0.0  # the first entry of a priority is its oldest
        classes[name] = Waiting(before.num_jobs + count, max(before.oldest_s, age_s))
    return waiting


def eta_by_class(
    redis: Redis,
    workers: Sequence[WorkerEntry],
    running: Sequence[ListedJob],
    model: str,
    waiting: Mapping[str, Waiting],
) -> dict[str, float | None]:
    """Return the seconds until a new job of each class would get a slot. Raises RedisError.

    The value is None if no worker serves the model, or while the duration of similar jobs is unknown.
    """
    ahead = 0
    eta_s: float | None = None
    etas: dict[str, float | None] = {}
    for name, priorities in CLASSES.items():
        ahead += waiting[name].num_jobs
        # A new job of a class without jobs waits as long as one of the class before, so no job is read twice.
        if not etas or waiting[name].num_jobs or any(job.priority in priorities for job in running):
            eta_s = estimate(redis, workers, running, queue_name(model), JobsAhead(ahead, ahead), priorities[-1]).eta_s
        etas[name] = eta_s
    return etas

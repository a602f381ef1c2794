"""When a slot becomes free for a job, from how long the jobs before it are likely to take. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from redis import Redis

from cellama.tasks.connection.redis_clock import seconds_of
from cellama.tasks.contract.errors import UnknownJob
from cellama.tasks.contract.keys import PRIORITY_WEIGHT, job_key, running_key, waiting_key
from cellama.tasks.contract.names import CLASSES, DEFAULT_MODEL, PRIORITY_INTERACTIVE, queue_name
from cellama.tasks.contract.shapes.workers import WorkerModel
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import JobWork, work_of_text
from cellama.tasks.state.registry import WorkerEntry, live_workers

from .samples import JobClass, Samples, class_of, read_samples

# Standard deviations from the estimate to each end of the range. In the simulation of tests/unit/tasks/test_forecast.py
# the range holds for 82 % of the jobs or more in each case; with 1.4 deviations it holds for 74 % in the worst case.
NUM_DEVIATIONS = 1.7
SPEED_DEVIATION = 0.15  # of the estimate: heartbeats report the speed of a single second, which varies
GUESS_DEVIATION = 0.5  # of the estimate, while no job of these classes has ended and lengths are guessed
HANDLING_S = 1.0  # seconds that queue, worker and engine may need in addition


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """Seconds that a job occupies slots, in all, as a mean and a variance; `num_slots` of them at the same time."""

    mean_s: float
    variance: float
    num_slots: int = 1


@dataclass(frozen=True, slots=True)
class WaitEstimate:
    """Seconds until a job gets a slot: the estimate and its range, and the number of ended jobs that it rests on.

    `eta_s` and `most_s` are absent (None) if it is unknown how long such jobs take.
    """

    eta_s: float | None = None
    least_s: float = 0.0
    most_s: float | None = None
    learnt_from: int = 0


def service_time(seconds: Sequence[float], elapsed_s: float = 0.0, num_slots: int = 1) -> ServiceTime:
    """Return the time that remains of a job that may take any of these `seconds`, of which `elapsed_s` have passed.

    A job that has taken longer than all of them is taken to need another tenth.
    """
    left = [each - elapsed_s for each in seconds if each > elapsed_s] or [0.1 * elapsed_s]
    mean_s = sum(left) / len(left)
    return ServiceTime(mean_s, sum((each - mean_s) ** 2 for each in left) / len(left), num_slots)


def forecast(
    num_slots: int,
    running: Sequence[ServiceTime],
    ahead: Sequence[ServiceTime],
    num_ahead: int,
    learnt_from: int = 0,
) -> WaitEstimate:
    """Return when the job behind all these gets a slot.

    Each job takes its mean time in the slot that is free first. `ahead` are the jobs that wait before it, or an even
    sample of these `num_ahead` jobs.
    """
    free_at = sorted(job.mean_s / job.num_slots for job in running for _ in range(job.num_slots))[-num_slots:]
    free_at = [0.0] * (num_slots - len(free_at)) + free_at
    for job in ahead:
        for _ in range(job.num_slots):
            heapq.heapreplace(free_at, free_at[0] + job.mean_s / job.num_slots)
    left_out = num_ahead / len(ahead) - 1 if ahead else 0.0  # jobs that each of the sample stands for, besides itself
    eta_s = free_at[0] + left_out * sum(job.mean_s for job in ahead) / num_slots
    if not eta_s:
        return WaitEstimate(0.0, least_s=0.0, most_s=HANDLING_S, learnt_from=learnt_from)
    variance = sum(job.variance for job in running) + (1 + left_out) * sum(job.variance for job in ahead)
    relative = SPEED_DEVIATION if learnt_from else GUESS_DEVIATION
    spread_s = NUM_DEVIATIONS * math.hypot(math.sqrt(variance) / num_slots, relative * eta_s) + HANDLING_S
    return WaitEstimate(eta_s, least_s=max(0.0, eta_s - spread_s), most_s=eta_s + spread_s, learnt_from=learnt_from)


JobState = Literal["waiting", "running", "done"]
MAX_AHEAD = 200  # jobs that are read, or an even sample of more: it errs by about 7 % if lengths vary like their mean
MOST_RUNNING = 2000  # jobs that are read: those of some hundred workers
GUESSED = (0.1, 0.3, 0.6, 0.9, 1.0)  # parts of the tokens asked for, as long as no job of the class has ended
TEXT_SLOTS = 16  # jobs at the same time of a model without an engine


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a job in its queue, and an estimate of its wait.

    The range from `eta_least_s` to `eta_most_s` contains the real wait in at least 80 % of the cases. `eta_s` and
    `eta_most_s` are None if no worker serves the model, and while the duration of such jobs is unknown.
    """

    job_id: str  # id of the job
    state: JobState  # state of the job
    ahead: int = 0  # number of jobs that get a slot before this one
    eta_s: float | None = 0.0  # estimated seconds until the job gets a slot
    finish_reason: str | None = None  # finish reason of a finished job
    error: str | None = None  # message of a failed job
    eta_least_s: float = 0.0  # lower end of the range of the estimate
    eta_most_s: float | None = 0.0  # upper end of this range
    learnt_from: int = 0  # number of jobs from which the range was learned; 0: it is assumed
    served: bool = True  # whether a worker serves the model


@dataclass(frozen=True, slots=True)
class ListedJob:
    """A job that waits, or has run on `worker` for `elapsed_s`."""

    kind: JobClass
    work: JobWork
    priority: int
    worker: str = ""
    elapsed_s: float = 0.0


def position_of(redis: Redis, job_id: str) -> Position:
    """Return the position of a job. Raises UnknownJob."""
    ledger = Ledger(redis)
    state, ahead = ledger.state(job_id), ledger.place(job_id)
    if state is None:
        raise UnknownJob(
            f"there is no job {job_id}, or not any more; a job that plain Celery sent is known once it runs"
        )
    if state == "done":
        ending = ledger.ending(job_id)
        event = None if ending is None else ending.event
        if event is not None and event["type"] == "error":
            return Position(job_id, "done", finish_reason="error", error=event["message"])
        return Position(job_id, "done", finish_reason=None if event is None else event["finish_reason"])
    queue = ledger.queue(job_id) or ""
    workers = live_workers(redis)
    served = bool(_serving(workers, queue))
    if ahead is None:
        eta = 0.0 if state == "running" else None
        return Position(job_id, "waiting" if eta is None else "running", eta_s=eta, eta_most_s=eta, served=served)
    raw: Any = redis.hget(job_key(job_id), "priority")
    found = estimate(redis, workers, running_jobs(redis), queue, ahead, int(raw or PRIORITY_INTERACTIVE))
    return Position(
        job_id,
        "waiting",
        ahead=ahead,
        eta_s=None if found.eta_s is None else round(found.eta_s, 3),
        eta_least_s=round(found.least_s, 3),
        eta_most_s=None if found.most_s is None else round(found.most_s, 3),
        learnt_from=found.learnt_from,
        served=served,
    )


def estimate(
    redis: Redis,
    workers: Sequence[WorkerEntry],
    running_now: Sequence[ListedJob],
    queue: str,
    ahead: int,
    priority: int,
) -> WaitEstimate:
    """Return when a job of that priority gets a slot if `ahead` jobs wait before it. Raises RedisError."""
    serving = _serving(workers, queue)
    if not serving:
        return WaitEstimate()
    num_slots = sum(_num_slots(model) for _, model in serving)
    names, queues = {worker.name for worker, _ in serving}, _queues_of(serving, queue)
    running = [job for job in running_now if job.kind.queue in queues and job.worker and job.priority <= priority]
    waiting = [job for job in running if job.worker not in names]  # their worker has died: they start first
    running = [job for job in running if job.worker in names]
    waiting += _waiting(redis, queue, ahead)
    if sum(job.work.pieces for job in (*running, *waiting)) < num_slots:
        return WaitEstimate(0.0, least_s=0.0, most_s=HANDLING_S)
    samples = read_samples(redis, {job.kind for job in (*running, *waiting)})
    speed = _speed(serving, samples)
    times = [_service_time(job, samples, speed, num_slots) for job in (*running, *waiting)]
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        return WaitEstimate()
    count = len(running)
    return forecast(num_slots, known[:count], known[count:], max(ahead, len(waiting)), samples.num_samples)


def _service_time(job: ListedJob, samples: Samples, speed: float | None, num_slots: int) -> ServiceTime | None:
    """Return how long a job takes from now on; None if that can't even be guessed."""
    seconds = amounts = samples.amounts(job.kind, job.work.asked)
    if job.work.counts_tokens:
        amounts = amounts or [job.work.asked * part for part in ((1.0,) if job.work.is_exact else GUESSED)]
        seconds = [amount / speed for amount in amounts] if speed else []
    pieces = min(job.work.pieces, num_slots)
    return service_time(seconds, job.elapsed_s * pieces, pieces) if seconds else None


def _serving(workers: Sequence[WorkerEntry], queue: str) -> list[tuple[WorkerEntry, WorkerModel]]:
    """Return the workers that serve a queue, each with the model that does."""
    is_default = queue == queue_name(DEFAULT_MODEL)
    return [
        (worker, model)
        for worker in workers
        for model in worker.models
        if model["status"] == "ready" and (queue_name(model["id"]) == queue or (is_default and model["default"]))
    ]


def _num_slots(model: WorkerModel) -> int:
    return TEXT_SLOTS if model["engine"] is None else model["engine"]["slots_total"]


def _queues_of(serving: Sequence[tuple[WorkerEntry, WorkerModel]], queue: str) -> set[str]:
    """Return the queues whose jobs run in the same slots as those of `queue`."""
    default = {queue_name(DEFAULT_MODEL)} if any(model["default"] for _, model in serving) else set()
    return {queue, *(queue_name(model["id"]) for _, model in serving), *default}


def _speed(serving: Sequence[tuple[WorkerEntry, WorkerModel]], samples: Samples) -> float | None:
    """Return the tokens per second and slot that the engines report, or while none generates those of the last jobs."""
    engines = [model["engine"] for _, model in serving if model["engine"] is not None]
    num_decoding = sum(engine["slots_decoding"] for engine in engines)
    rate = sum(engine["generation_rate"] for engine in engines)
    if not engines:  # jobs of models without an engine are counted in seconds
        return 1.0
    return rate / num_decoding if num_decoding and rate > 0 else samples.speed


def running_jobs(redis: Redis) -> list[ListedJob]:
    """Return the jobs that have a slot, MOST_RUNNING at most. Raises RedisError."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.time()
    pipeline.zrange(running_key(), 0, MOST_RUNNING - 1, withscores=True)
    time, entries = pipeline.execute()
    since = {raw.decode(): seconds_of(time) - score for raw, score in entries}
    return [replace(job, elapsed_s=max(0.0, since[job_id])) for job_id, job in _jobs(redis, list(since))]


def _waiting(redis: Redis, queue: str, ahead: int) -> list[ListedJob]:
    """Return the jobs before a place in a queue, or an even sample of many."""
    pipeline = redis.pipeline(transaction=False)
    for place in range(0, ahead, max(1, -(-ahead // MAX_AHEAD))):
        pipeline.zrange(waiting_key(queue), place, place)
    ids = [raw.decode() for found in pipeline.execute() for raw in found]
    return [replace(job, worker="") for _, job in _jobs(redis, ids)]


def _jobs(redis: Redis, job_ids: Sequence[str]) -> Iterator[tuple[str, ListedJob]]:
    pipeline = redis.pipeline(transaction=False)
    for job_id in job_ids:
        pipeline.hmget(job_key(job_id), "queue", "work", "priority", "worker")
    for job_id, found in zip(job_ids, pipeline.execute(), strict=True):
        queue, work, priority, worker = ((value or b"").decode() for value in found)
        if queue:
            asked, urgency = work_of_text(work), int(priority or PRIORITY_INTERACTIVE)
            kind = class_of(queue, asked, urgency)
            yield job_id, ListedJob(kind, work=asked, priority=urgency, worker=worker.partition(" ")[0])


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

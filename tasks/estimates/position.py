"""Where a job is, and when its turn comes, as far as that can be known."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from redis import Redis

from cellama.tasks.connection.redis_clock import seconds_of
from cellama.tasks.contract.errors import UnknownJob
from cellama.tasks.contract.keys import job_key, running_key, waiting_key
from cellama.tasks.contract.names import DEFAULT_MODEL, PRIORITY_INTERACTIVE, queue_name
from cellama.tasks.contract.shapes.workers import WorkerModel
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Work, work_of_text
from cellama.tasks.state.registry import WorkerEntry, live_workers

from .forecast import Ahead, Forecast, Running, Server, forecast
from .samples import Class, Learnt, class_of, read_learnt

JobState = Literal["waiting", "running", "done"]
MOST_AHEAD = 400  # jobs that are looked at one by one; of more, so many stand for all
MOST_RUNNING = 2000
LIVE_WEIGHT = 2  # how often a worker's speed of now counts, for each of those that it had
GUESSED = (0.1, 0.3, 0.6, 0.9, 1.0)  # parts of the tokens asked for, as long as none of its kind has ended
TEXT_SLOTS = 16  # jobs at once of a model that has no engine


@dataclass(frozen=True, slots=True)
class Position:
    """`ahead` counts the jobs that get a slot before this one; `eta_s` is about how many seconds that takes.

    `eta_least_s` and `eta_most_s` are the range of what is likely: 98 % of the waits of `cellama bench positions` were
    within it. It was learnt from `learnt_from` jobs; with 0
    it is a guess. `eta_s` and `eta_most_s` are None when no worker serves its model (`served` is false then), and while
    nothing is known of how long such jobs take. Of a job that is done, `finish_reason` says how it ended, and `error`
    why, if it failed: as in its last event.
    """

    job_id: str
    state: JobState
    ahead: int = 0
    eta_s: float | None = 0.0
    finish_reason: str | None = None
    error: str | None = None
    eta_least_s: float = 0.0
    eta_most_s: float | None = 0.0
    learnt_from: int = 0
    served: bool = True


@dataclass(frozen=True, slots=True)
class Job:
    """A job that waits, or has run on `worker` for `elapsed_s`."""

    kind: Class
    work: Work
    priority: int
    worker: str = ""
    elapsed_s: float = 0.0

    def amounts(self, learnt: Learnt) -> list[float]:
        if known := learnt.amounts(self.kind, self.work):
            return known
        if not self.work.counts_tokens:
            return []
        return [float(self.work.asked)] if self.work.is_exact else [self.work.asked * part for part in GUESSED]


def position_of(redis: Redis, job_id: str) -> Position:
    """The position of a job. Raises UnknownJob."""
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
    if ahead is None:
        served = bool(_serving(workers, queue))
        eta = 0.0 if state == "running" else None
        return Position(job_id, "waiting" if eta is None else "running", 0, eta, eta_most_s=eta, served=served)
    raw: Any = redis.hget(job_key(job_id), "priority")
    running, priority = running_jobs(redis), int(raw or PRIORITY_INTERACTIVE)
    found = estimate(redis, workers, running, queue, ahead, priority, zlib.crc32(job_id.encode()))
    if found is None:
        return Position(job_id, "waiting", ahead, None, eta_most_s=None, served=False)
    when, learnt_from = found
    if when is None:
        return Position(job_id, "waiting", ahead, None, eta_most_s=None)
    eta_s, least_s, most_s = (round(seconds, 3) for seconds in (when.eta_s, when.least_s, when.most_s))
    times = Position(job_id, "waiting", ahead, eta_s, eta_least_s=least_s, eta_most_s=most_s)
    return replace(times, learnt_from=learnt_from)


def estimate(
    redis: Redis,
    workers: Sequence[WorkerEntry],
    running_now: Sequence[Job],
    queue: str,
    ahead: int,
    priority: int,
    seed: int = 0,
) -> tuple[Forecast | None, int] | None:
    """When a job of that priority with so many before it gets a slot, and from how many jobs that was learnt.

    None if no live worker serves it; (None, 0) if nothing is known of how long such jobs take. Raises RedisError.
    """
    serving = _serving(workers, queue)
    if not serving:
        return None
    names = [worker.name for worker, _ in serving]
    queues = {queue, *_siblings(serving, queue)}
    running = [job for job in running_now if job.kind.queue in queues and job.worker and job.priority <= priority]
    waiting = [job for job in running if job.worker not in names]  # their worker is gone: they come first
    running = [job for job in running if job.worker in names]
    waiting += _waiting(redis, queue, ahead)
    learnt = read_learnt(redis, [job.kind for job in (*running, *waiting)], queue, names)
    servers = [_server(worker.name, model, learnt, (*running, *waiting)) for worker, model in serving]
    amounts = {job: job.amounts(learnt) for job in (*running, *waiting)}
    most = max(server.num_slots for server in servers)
    before = [Ahead(amounts[job], min(job.work.pieces, most)) for job in waiting]
    sizes = [sum(each.amounts) / len(each.amounts) for each in before if each.amounts]
    rest = max(0, ahead - MOST_AHEAD) * sum(sizes) / max(1, len(sizes))
    now = [Running(names.index(job.worker), job.elapsed_s, amounts[job], min(job.work.pieces, most)) for job in running]
    known = learnt.num_samples()
    return forecast(servers, now, before, rest, is_learnt=known > 0, seed=seed), known


def _serving(workers: Sequence[WorkerEntry], queue: str) -> list[tuple[WorkerEntry, WorkerModel]]:
    """Who serves a queue, and with what."""
    is_default = queue == queue_name(DEFAULT_MODEL)
    return [
        (worker, model)
        for worker in workers
        for model in worker.models
        if model["status"] == "ready" and (queue_name(model["id"]) == queue or (is_default and model["default"]))
    ]


def _siblings(serving: Sequence[tuple[WorkerEntry, WorkerModel]], queue: str) -> set[str]:
    """Other queues whose jobs run in the same slots."""
    own = {queue_name(model["id"]) for _, model in serving}
    default = {queue_name(DEFAULT_MODEL)} if any(model["default"] for _, model in serving) else set()
    return (own | default) - {queue}


def _server(worker: str, model: WorkerModel, learnt: Learnt, jobs: Iterable[Job]) -> Server:
    engine = model["engine"]
    if engine is None or not any(job.work.counts_tokens for job in jobs):
        return Server(TEXT_SLOTS if engine is None else engine["slots_total"], (1.0,))
    before = learnt.speeds_of(worker)
    decoding, rate = engine["slots_decoding"], engine["generation_rate"]
    now = [rate / decoding] * (LIVE_WEIGHT * max(1, len(before))) if decoding and rate > 0 else []
    return Server(engine["slots_total"], (*now, *before))


def running_jobs(redis: Redis) -> list[Job]:
    """The jobs that have a slot, MOST_RUNNING at most. Raises RedisError."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.time()
    pipeline.zrange(running_key(), 0, MOST_RUNNING - 1, withscores=True)
    time, entries = pipeline.execute()
    since = {raw.decode(): seconds_of(time) - score for raw, score in entries}
    return [replace(job, elapsed_s=max(0.0, since[job_id])) for job_id, job in _jobs(redis, list(since))]


def _waiting(redis: Redis, queue: str, ahead: int) -> list[Job]:
    """The jobs before a place in a queue; of many, some from all over."""
    if not ahead:
        return []
    key = waiting_key(queue)
    if ahead <= MOST_AHEAD:
        ids: Any = redis.zrange(key, 0, ahead - 1)
    else:
        pipeline = redis.pipeline(transaction=False)
        for number in range(MOST_AHEAD):
            place = number * ahead // MOST_AHEAD
            pipeline.zrange(key, place, place)
        ids = [raw for found in pipeline.execute() for raw in found]
    return [job for _, job in _jobs(redis, [raw.decode() for raw in ids])]


def _jobs(redis: Redis, job_ids: Sequence[str]) -> Iterator[tuple[str, Job]]:
    pipeline = redis.pipeline(transaction=False)
    for job_id in job_ids:
        pipeline.hmget(job_key(job_id), "queue", "work", "priority", "worker")
    for job_id, found in zip(job_ids, pipeline.execute(), strict=True):
        queue, work, priority, worker = ((value or b"").decode() for value in found)
        if queue:
            asked, urgency = work_of_text(work), int(priority or PRIORITY_INTERACTIVE)
            yield job_id, Job(class_of(queue, asked, urgency), asked, urgency, worker.partition(" ")[0])

"""List the jobs that have not ended, and find jobs in any state.

`open_jobs` reads running and waiting jobs. `find_jobs` searches these jobs and the MAX_ENDED jobs that ended most
recently. A script filters the jobs in Redis, which takes about 50 ms for 10,000 jobs. The script runs in parts, so that
Redis can execute other commands in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.keys import delayed_key, ended_key, job_key, queues_key, running_key, waiting_key
from cellama.tasks.contract.names import is_model_queue, model_of, queue_name

from .scripts import source

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
    """Return the models for which jobs are waiting or were recently waiting, even if no worker serves them."""
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


FoundState = Literal["waiting", "running", "succeeded", "failed", "cancelled", "timeout"]
REASONS: dict[str, FoundState] = {"error": "failed", "cancelled": "cancelled", "timeout": "timeout"}  # else "succeeded"
ENDED_STATES: dict[str, str] = {  # filter → reasons at the end of a job (`reason_of` in ledger.lua)
    "ended": "",
    "succeeded": ",stop,length,",
    "failed": ",error,timeout,",
    "cancelled": ",cancelled,",
}
FILTER_STATES = ("waiting", "running", *ENDED_STATES)
PART_JOBS = 500  # jobs per run of the script, which blocks Redis for about a millisecond
MAX_SEARCHED = 20_000  # jobs per search; the next search continues after them
NUM_VALUES = 10  # that the script returns for each job


@dataclass(frozen=True, slots=True)
class JobFilter:
    """A filter for jobs. An empty field matches all jobs.

    `state` is one of FILTER_STATES, `model` is a model id, `kind` is the name of a task without `cellama.`, and `text`
    is a part of the job id. `tenant` restricts the search to jobs that this tenant's requests created. If `tenant` is
    None, jobs of all tenants match.
    """

    state: str = ""
    model: str = ""
    kind: str = ""
    text: str = ""
    tenant: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundJob:
    """A job in any state. Times are in Unix seconds, by Redis' clock."""

    job_id: str
    state: FoundState
    kind: str  # name of the task without `cellama.`
    model: str  # id of the model
    priority: int  # 0 (most urgent) to 9
    tenant: str  # "" if no tenant's request created the job
    submitted_at: float  # time of submission
    changed_at: float | None  # start time of a running job, end time of an ended job, or None
    attempts: int  # number of attempts
    worker: str  # worker of the last attempt, or ""


@dataclass(frozen=True, slots=True)
class FoundJobs:
    """A page of jobs. `after` is the position at which the next page starts, or None on the last page."""

    jobs: list[FoundJob]
    after: str | None


@dataclass(frozen=True, slots=True)
class _JobSet:
    """A sorted set of jobs, the order in which to read the set, and the state of its jobs."""

    key: str
    order: Literal["rising", "falling"]
    state: Literal["waiting", "running", "ended"]


async def find_jobs(redis: AsyncRedis, wanted: JobFilter, limit: int, after: str = "") -> FoundJobs:
    """Return up to `limit` jobs: running jobs, then waiting jobs in queue order, then ended jobs, latest first.

    `after` is the position at which the page starts. A page may contain fewer than `limit` jobs, or no jobs, although
    more pages follow. Raises RedisError, and InvalidJob for an invalid position.
    """
    sets = await _sets(redis, wanted)
    index, rank = _position(after)
    script, num_searched = redis.register_script(source("find")), 0
    found: list[FoundJob] = []
    while index < len(sets) and len(found) < limit and num_searched < MAX_SEARCHED:
        one = sets[index]
        args: list[str | int] = [
            rank,
            PART_JOBS,
            int(one.order == "falling"),
            limit - len(found),
            *_conditions(wanted, one),
        ]
        num_seen, *values = await script(keys=[one.key], args=args, client=redis)
        texts = [value.decode() for value in values]
        found += [_found(texts[i : i + NUM_VALUES], one) for i in range(0, len(texts), NUM_VALUES)]
        num_searched, rank = num_searched + num_seen, rank + num_seen
        if num_seen < PART_JOBS and len(found) < limit:
            index, rank = index + 1, 0
    return FoundJobs(found, f"{index}.{rank}" if index < len(sets) else None)


async def _sets(redis: AsyncRedis, wanted: JobFilter) -> list[_JobSet]:
    """Return the sorted sets that may contain matching jobs, in list order."""
    queues: Any = await redis.smembers(queues_key())
    names = sorted(name for raw in queues if is_model_queue(name := raw.decode()))
    if wanted.model:
        names = [queue_name(wanted.model)]
    waiting = [_JobSet(waiting_key(name), "rising", "waiting") for name in names]
    sets = [
        _JobSet(running_key(), "falling", "running"),
        *waiting,
        _JobSet(delayed_key(), "rising", "waiting"),
        _JobSet(ended_key(), "falling", "ended"),
    ]
    state = "ended" if wanted.state in ENDED_STATES else wanted.state
    return [one for one in sets if state in ("", one.state)]


def _position(after: str) -> tuple[int, int]:
    """Return where a page starts: the index of a sorted set, and a rank within this set. Raises InvalidJob."""
    if not after:
        return 0, 0
    index, _, rank = after.partition(".")
    if not (index.isascii() and index.isdecimal() and rank.isascii() and rank.isdecimal() and len(after) < 20):
        raise InvalidJob(f"after: {after!r} is not the position of a page; start again with the first page")
    return int(index), int(rank)


def _conditions(wanted: JobFilter, one: _JobSet) -> list[str]:
    return [
        wanted.text,
        f"cellama.{wanted.kind}" if wanted.kind else "",
        queue_name(wanted.model) if wanted.model else "",
        "*" if wanted.tenant is None else wanted.tenant,
        ENDED_STATES.get(wanted.state, "") if one.state == "ended" else "",
    ]


def _found(values: list[str], one: _JobSet) -> FoundJob:
    job_id, score, task, queue, priority, submitted_at, attempts, worker, tenant, reason = values
    state: FoundState = REASONS.get(reason, "succeeded") if one.state == "ended" else one.state
    return FoundJob(
        job_id=job_id,
        state=state,
        kind=task.removeprefix("cellama."),
        model=model_of(queue),
        priority=int(priority or 0),
        tenant=tenant,
        submitted_at=float(submitted_at or 0),
        changed_at=None if state == "waiting" else float(score),
        attempts=int(attempts or 0),
        worker=worker.partition(" ")[0],
    )

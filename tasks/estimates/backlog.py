"""Read the work for each pool's workers from Redis, also while no worker is running."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from redis import Redis

from cellama.config import get_settings
from cellama.tasks.contract.fairness import limit_name
from cellama.tasks.contract.keys import waiting_key
from cellama.tasks.contract.names import DEFAULT_MODEL, PRIORITIES, model_of, queue_key, queue_name, queues_of_model
from cellama.tasks.state.fair_shares import limits
from cellama.tasks.state.ledger import JobsAhead
from cellama.tasks.state.pools import PoolModel, recorded_pools
from cellama.tasks.state.registry import WorkerEntry, is_served, live_workers

from .position import (
    TEXT_SLOTS,
    ListedJob,
    first_jobs,
    num_slots_of,
    remaining_time,
    running_jobs,
    serving_models,
    speed_of,
)
from .samples import read_samples
from .scaling import PoolDemand

Pools = dict[str, dict[str, PoolModel]]


def pool_demands(redis: Redis, startup_s: float = 0.0) -> dict[str, PoolDemand]:
    """Return the work for each pool. Raises RedisError.

    The pools are those with live workers, those whose workers stopped in the last 30 days, and the pool in this
    process's settings, if the settings list models. If several pools serve a model, its work is divided equally among
    these pools. A new worker loads its models after `startup_s` seconds.
    """
    workers, running, limit_of = live_workers(redis), running_jobs(redis), limits(redis)
    pools = _pools(workers, recorded_pools(redis))
    pool_of = {worker.name: worker.pool for worker in workers}
    backlogs: dict[str, list[_Backlog]] = defaultdict(list)
    for model, serving in _pools_by_model(pools).items():
        here = [job for job in running if _model_of(job) == model]
        lost = [job for job in here if job.worker not in pool_of]  # jobs of crashed workers
        waiting = _waiting(redis, model, lost)
        for pool in serving:
            slots = pools[pool][_resolved(model, pools[pool])].slots or TEXT_SLOTS
            own = [job for job in here if pool_of.get(job.worker) == pool]
            own_workers = [worker for worker in workers if worker.pool == pool]
            share = _JobSample(waiting.jobs, waiting.num_jobs / len(serving))
            backlogs[pool].append(_backlog(redis, model, slots, own_workers, own, share, limit_of))
    return {
        pool: _demand(backlogs[pool], [worker for worker in workers if worker.pool == pool], models, startup_s)
        for pool, models in pools.items()
    }


def _pools(workers: Iterable[WorkerEntry], recorded: Pools) -> Pools:
    """Return the models of each pool. Entries of live workers replace the records of earlier workers."""
    settings, pools = get_settings(), {}
    if "models" in settings.model_fields_set:  # not the bundled model that is the default
        default = settings.default_model.id
        pools[settings.pool] = {model.id: PoolModel(is_default=model.id == default) for model in settings.models}
    pools |= recorded
    for worker in workers:
        for model in worker.models:
            if is_served(model):
                pools.setdefault(worker.pool, {})[model["id"]] = PoolModel(
                    slots=num_slots_of(model), load_s=model.get("load_s", 0.0), is_default=model["default"]
                )
    return pools


def _pools_by_model(pools: Pools) -> dict[str, list[str]]:
    """Return the pools that serve each model. `:default` is served by all pools with a default model."""
    serving: dict[str, list[str]] = defaultdict(list)
    for pool, models in pools.items():
        for name in models:
            serving[name].append(pool)
        if any(model.is_default for model in models.values()):
            serving[DEFAULT_MODEL].append(pool)
    return serving


def _resolved(model: str, models: Mapping[str, PoolModel]) -> str:
    """Return the id of the model that serves `:default`, or the model's own id."""
    return next(name for name in models if models[name].is_default) if model == DEFAULT_MODEL else model


def _model_of(job: ListedJob) -> str:
    return model_of(queue_name(model_of(job.kind.queue)))  # also resolves aliases


@dataclass(frozen=True, slots=True)
class _JobSample:
    """An even sample of `num_jobs` jobs. It is empty if only plain Celery's messages are waiting."""

    jobs: Sequence[ListedJob]
    num_jobs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backlog:
    """The jobs of one model that a pool's workers must compute."""

    num_jobs: float
    num_useful: int
    work_s: float | None  # time in which one worker could finish the jobs


def _waiting(redis: Redis, model: str, lost: Sequence[ListedJob]) -> _JobSample:
    """Return a model's waiting jobs and the lost jobs.

    Messages of plain Celery have no ledger entry until a worker takes them, so the lists are counted as well.
    """
    queues = queues_of_model(model)
    pipeline = redis.pipeline(transaction=False)
    for queue in queues:
        pipeline.zcard(waiting_key(queue))
        for priority in PRIORITIES:
            pipeline.llen(queue_key(queue, priority))
    found = iter(pipeline.execute())
    counts = [(next(found), sum(next(found) for _ in PRIORITIES)) for _ in queues]
    jobs = [
        job
        for queue, (num_entries, _) in zip(queues, counts, strict=True)
        for job in first_jobs(redis, queue, JobsAhead(num_entries, num_entries))
    ]
    return _JobSample([*jobs, *lost], sum(map(max, counts)) + len(lost))


def _backlog(
    redis: Redis,
    model: str,
    slots: int,
    workers: Sequence[WorkerEntry],
    running: Sequence[ListedJob],
    waiting: _JobSample,
    limit_of: Mapping[str, int],
) -> _Backlog:
    """Return the work of a model's running and waiting jobs."""
    num_jobs = len(running) + waiting.num_jobs
    if not num_jobs:
        return _Backlog(num_jobs=0, num_useful=0, work_s=0.0)
    samples = read_samples(redis, {job.kind for job in (*running, *waiting.jobs)})
    speed = speed_of(serving_models(workers, queue_name(model)), samples) if workers else samples.speed
    weight = waiting.num_jobs / len(waiting.jobs) if waiting.jobs else 0.0
    work_s: float | None = 0.0 if waiting.jobs or not waiting.num_jobs else None
    for job, count in [(job, 1.0) for job in running] + [(job, weight) for job in waiting.jobs]:
        time = remaining_time(job, samples, speed, slots)
        work_s = None if time is None or work_s is None else work_s + count * time.mean_s / slots
    parts = _parts_within_limits(model, slots, running, waiting, weight, limit_of)
    return _Backlog(num_jobs=num_jobs, num_useful=math.ceil(round(parts / slots, 6)), work_s=work_s)


def _parts_within_limits(
    model: str,
    slots: int,
    running: Sequence[ListedJob],
    waiting: _JobSample,
    weight: float,
    limit_of: Mapping[str, int],
) -> float:
    """Return how many slots the jobs can occupy at the same time. Jobs above a limit wait even if slots are free."""
    by_key: Counter[str] = Counter()
    num_jobs: Counter[str] = Counter()
    for job, count in [(job, 1.0) for job in running] + [(job, weight) for job in waiting.jobs]:
        by_key[job.fairness_key] += count * min(job.work.num_parts, slots)  # type: ignore[assignment]
        num_jobs[job.fairness_key] += count  # type: ignore[assignment]
    total, total_jobs = 0.0, 0.0
    for key, parts in by_key.items():
        levels = key.split("/")
        names = ("/".join(levels[:end]) for end in range(1, len(levels) + 1))
        allowed = min([num_jobs[key], *(limit_of[name] for name in names if name in limit_of)])
        total += parts * allowed / num_jobs[key]
        total_jobs += allowed
    if not by_key:
        return waiting.num_jobs
    model_limit = limit_of.get(limit_name(model=model), total_jobs)
    return total * min(1.0, model_limit / total_jobs)


def _demand(
    backlogs: Sequence[_Backlog],
    workers: Sequence[WorkerEntry],
    models: Mapping[str, PoolModel],
    startup_s: float,
) -> PoolDemand:
    """Return the sum of the models' work, because the models of a worker share its devices."""
    times = [backlog.work_s for backlog in backlogs]
    known = [time for time in times if time is not None]
    return PoolDemand(
        num_jobs=math.ceil(sum(backlog.num_jobs for backlog in backlogs)),
        num_useful=sum(backlog.num_useful for backlog in backlogs),
        backlog_s=None if len(known) < len(times) and not sum(known) else sum(known),
        num_workers=len(workers),
        idle_s=min((_idle_s(worker) for worker in workers), default=0.0),
        start_s=startup_s + sum(model.load_s for model in models.values()),
    )


def _idle_s(worker: WorkerEntry) -> float:
    """Return the time since a worker's last request, or since it was ready. Only the worker's own clock is used."""
    used_at = [max(model.get("last_used_at", 0.0), model.get("ready_at", 0.0)) for model in worker.models]
    return max(0.0, worker.at - max(used_at, default=worker.started_at)) + worker.age_s

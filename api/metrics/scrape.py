"""Read metrics about queues, leases, bulk runs and tenants from Redis, no more than once per second."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from cellama.api.keys.entry import KeyEntry
from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import redis_time
from cellama.tasks.contract.keys import (
    api_keys_key,
    dead_key,
    due_key,
    key_charges_key,
    key_jobs_key,
    leases_key,
    missing_key,
    running_key,
    shortages_key,
)
from cellama.tasks.contract.names import CLASSES, DEFAULT_MODEL, class_of_priority, model_of, queue_keys, queue_name
from cellama.tasks.estimates.backlog import pool_demands
from cellama.tasks.estimates.position import (
    MAX_RUNNING,
    ListedJob,
    Waiting,
    eta_by_class,
    running_jobs,
    waiting_by_class,
)
from cellama.tasks.estimates.scaling import PoolScaler, ScalingPolicy
from cellama.tasks.metrics.figures import OTHER, Figures
from cellama.tasks.state.bulk_runs import OPEN_STATES, Batches
from cellama.tasks.state.job_list import queued_models
from cellama.tasks.state.registry import WorkerEntry, live_workers
from cellama.tasks.state.tenants import tenant_shares

log = event_logger(__name__)

CACHE_S = 1.0  # metrics are served again for this long, so that several scrapers cost as much as one
MAX_QUEUES = 100  # models, because more would make a scrape large and slow
MAX_ESTIMATES = 20  # models, because an estimate reads hundreds of jobs of each class
MAX_RUNS = 100  # bulk runs, those with the latest update first
MAX_KEYS = 100  # API keys, because more would make a scrape large and slow
MAX_SHARES = 20  # fairness keys with their own values, because each adds three time series
STATES = (*sorted(OPEN_STATES), "completed", "failed", "cancelled", "expired")


class Scrape:
    """Reads the metrics. Only the server's thread uses this class."""

    def __init__(
        self,
        redis: Redis,
        now: Callable[[], float] = time.monotonic,
        *,
        scaling: ScalingPolicy | None = None,
        startup_s: float = 0.0,
    ) -> None:
        """Prepare the metrics. `scaling` and `startup_s` determine how many workers each pool needs."""
        self._redis = redis
        self._now = now
        self._scaling = scaling or ScalingPolicy()
        self._startup_s = startup_s
        self._scalers: dict[str, PoolScaler] = {}
        self._read_at: float | None = None
        self._figures = Figures()
        self.is_up = True  # whether Redis answered the last time

    def __call__(self) -> Figures:
        """Return all metrics. If Redis does not answer, return only `cellama_up` with the value 0."""
        if self._read_at is None or self._now() - self._read_at >= CACHE_S:
            self._figures = self._read()
            self._read_at = self._now()
        return self._figures

    def _read(self) -> Figures:
        figures = Figures()
        try:
            at, workers = redis_time(self._redis), live_workers(self._redis)
            _add_workers(figures, workers)
            truncated = [
                add_queues(self._redis, figures, workers),
                add_bulk_runs(self._redis, figures),
                add_tenants(self._redis, figures, at),
                add_shares(self._redis, figures),
            ]
            add_ledger(self._redis, figures, at)
            self._add_pools(figures)
            self._add_memory(figures)
        except RedisError as error:
            if self.is_up:
                log.warning(
                    "Redis does not answer", detail=f"{error}; only the metric cellama_up is served until Redis answers"
                )
            figures, self.is_up = Figures(), False
            figures.add("cellama_up", 0)
            return figures
        self.is_up = True
        figures.add("cellama_up", 1)
        figures.add("cellama_scrape_truncated", float(any(truncated)))
        return figures

    def _add_pools(self, figures: Figures) -> None:
        for pool, demand in pool_demands(self._redis, self._startup_s).items():
            scaler = self._scalers.setdefault(pool, PoolScaler(self._scaling))
            figures.add("cellama_wanted_workers", scaler.next(demand, self._now()), pool)
            figures.add("cellama_pool_workers", demand.num_workers, pool)
            if demand.backlog_s is not None:
                figures.add("cellama_pool_backlog_seconds", demand.backlog_s, pool)

    def _add_memory(self, figures: Figures) -> None:
        try:
            memory = self._redis.info("memory")
        except ResponseError:  # the user of Redis may not run INFO
            return
        figures.add("cellama_redis_memory_bytes", float(memory["used_memory"]))
        figures.add("cellama_redis_memory_limit_bytes", float(memory.get("maxmemory", 0)))


def _add_workers(figures: Figures, workers: list[WorkerEntry]) -> None:
    figures.add("cellama_workers", len(workers))
    if workers:
        figures.add("cellama_worker_age_seconds", max(worker.age_s for worker in workers))


def add_queues(redis: Redis, figures: Figures, workers: Sequence[WorkerEntry]) -> bool:
    """Add the queues of `:default`, of models that workers serve, and of models with waiting or running jobs.

    Return whether queues were omitted because of the limits. Raises RedisError.
    """
    serving = Counter(_served(workers))
    running = running_jobs(redis)
    others = {*queued_models(redis), *map(_model, running)} - serving.keys() - {DEFAULT_MODEL}
    known = [DEFAULT_MODEL, *sorted(serving.keys() - {DEFAULT_MODEL}), *sorted(others)]
    models = known[:MAX_QUEUES]
    waiting = waiting_by_class(redis, models)
    _add_waiting(redis, figures, waiting)
    for model in models:
        figures.add("cellama_queue_workers", serving[model], model)
    _add_running(figures, models, running)
    _add_estimates(redis, figures, workers, running, waiting)
    return len(known) > MAX_QUEUES or len(models) > MAX_ESTIMATES or redis.zcard(running_key()) > MAX_RUNNING


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
    """Add estimates for the models with the most waiting jobs."""
    by_length = sorted(waiting, key=lambda model: -sum(found.num_jobs for found in waiting[model].values()))
    for model in by_length[:MAX_ESTIMATES]:
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
    """Yield the ids of each worker's ready models, and `:default` for each worker that serves the default model."""
    for worker in workers:
        for model in worker.models:
            if model["status"] == "ready":
                yield model["id"]
                if model["default"]:
                    yield DEFAULT_MODEL


def add_ledger(redis: Redis, figures: Figures, now: float) -> None:
    """Add the sizes of the ledger's sets at the time `now`, which is the Redis clock's time. Raises RedisError."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.zcard(leases_key())
    pipeline.zcount(leases_key(), "-inf", now)
    pipeline.zrange(leases_key(), 0, 0, withscores=True)
    pipeline.zcount(due_key(), "-inf", now)
    pipeline.zrange(due_key(), 0, 0, withscores=True)
    pipeline.zcard(missing_key())
    pipeline.hvals(shortages_key())
    pipeline.zcard(dead_key())
    found: list[Any] = pipeline.execute()
    leases, overdue, first_lease, due, first_due, missing, shortages, dead = found
    figures.add("cellama_ledger_leases", leases)
    figures.add("cellama_ledger_leases_overdue", overdue)
    figures.add("cellama_ledger_leases_overdue_seconds", _late(first_lease, now))
    figures.add("cellama_ledger_due", due)
    figures.add("cellama_ledger_due_seconds", _late(first_due, now))
    figures.add("cellama_ledger_missing", missing + sum(map(int, shortages)))
    figures.add("cellama_dead_jobs", dead)


def _late(first: list[tuple[bytes, float]], now: float) -> float:
    """Return the number of seconds since the first entry's time, or 0 if the time is in the future or missing."""
    return max(0.0, now - first[0][1]) if first else 0.0


def add_bulk_runs(redis: Redis, figures: Figures) -> bool:
    """Add bulk runs. Return whether more than MAX_RUNS runs are active.

    Runs in an unknown state are added as `other`. Raises RedisError.
    """
    for state in STATES:
        figures.add("cellama_bulk_runs", 0, state)
    runs = Batches(redis).all(MAX_RUNS + 1)
    for run in runs[:MAX_RUNS]:
        figures.add("cellama_bulk_runs", 1, run["state"] if run.get("state") in STATES else "other")
        if run["alive"]:
            total, done, failed = (_count(run.get(name)) for name in ("total", "finished", "failed"))
            figures.add("cellama_bulk_lines", done, "done")
            figures.add("cellama_bulk_lines", failed, "failed")
            figures.add("cellama_bulk_lines", max(0, total - done - failed), "left")
    return any(run["alive"] for run in runs[MAX_RUNS:])


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def add_tenants(redis: Redis, figures: Figures, now: float) -> bool:
    """Add the tenants of the first MAX_KEYS active keys, ordered by id.

    Return whether there are more than MAX_KEYS active keys. Raises RedisError.
    """
    stored: Any = redis.hgetall(api_keys_key())
    found = [entry for raw in stored.values() if (entry := _parsed(raw)) is not None and entry.state(now) == "active"]
    entries = sorted(found, key=lambda entry: entry.id)[:MAX_KEYS]
    pipeline = redis.pipeline(transaction=False)
    for entry in entries:
        pipeline.zcount(key_jobs_key(entry.id), now, "+inf")
        pipeline.hget(key_charges_key(entry.id), "tokens")
    replies = iter(pipeline.execute())
    for entry in entries:
        jobs, tokens = next(replies), next(replies)
        figures.add("cellama_tenant_jobs", jobs, entry.tenant)
        figures.add("cellama_tenant_window_tokens", float(tokens or 0), entry.tenant)
    return len(found) > MAX_KEYS


def add_shares(redis: Redis, figures: Figures) -> bool:
    """Add the fairness keys with the most service in the last hour, and the sums of all other keys as `other`.

    Return whether any keys were added as `other`. Raises RedisError.
    """
    shares = tenant_shares(redis)
    for index, share in enumerate(shares):
        tenant = share.key if index < MAX_SHARES else OTHER
        figures.add("cellama_tenant_waiting_jobs", share.num_waiting, tenant)
        figures.add("cellama_tenant_running_jobs", share.num_running, tenant)
        figures.add("cellama_tenant_service_tokens", share.service, tenant)
    return len(shares) > MAX_SHARES


def _parsed(raw: bytes) -> KeyEntry | None:
    try:
        return KeyEntry.model_validate_json(raw)
    except ValidationError:  # the gateway logs invalid entries
        return None

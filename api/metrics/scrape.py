"""All figures that come from Redis, read at most once a second: ledger, bulk runs, tenants, and `queues`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from cellama.api.keys.entry import KeyEntry
from cellama.tasks.connection.redis_clock import redis_time
from cellama.tasks.contract.keys import (
    api_keys_key,
    dead_key,
    due_key,
    key_charges_key,
    key_jobs_key,
    leases_key,
    missing_key,
)
from cellama.tasks.metrics.figures import Figures
from cellama.tasks.state.bulk_runs import OPEN_STATES, Batches
from cellama.tasks.state.registry import WorkerEntry, live_workers

from .queues import add_queues

log = logging.getLogger(__name__)

KEPT_S = 1.0  # figures are served again for that long, so that several scrapers cost as much as one
MOST_RUNS = 100  # bulk runs, by their last sign of life
STATES = (*sorted(OPEN_STATES), "completed", "failed", "cancelled", "expired")
MOST_KEYS = 100  # API keys; more would make a scrape large and slow


class Scrape:
    """Reads the figures. Only the thread of the server calls it."""

    def __init__(self, redis: Redis, now: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._now = now
        self._read_at: float | None = None
        self._figures = Figures()
        self.is_up = True  # Redis answered the last time

    def __call__(self) -> Figures:
        """Return all figures, or only `cellama_up`, which is 0, if Redis does not answer."""
        if self._read_at is None or self._now() - self._read_at >= KEPT_S:
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
            ]
            add_ledger(self._redis, figures, at)
            self._add_memory(figures)
        except RedisError as error:
            if self.is_up:
                log.warning("metrics: Redis does not answer: %s; there are no figures meanwhile", error)
            figures, self.is_up = Figures(), False
            figures.add("cellama_up", 0)
            return figures
        self.is_up = True
        figures.add("cellama_up", 1)
        figures.add("cellama_scrape_truncated", float(any(truncated)))
        return figures

    def _add_memory(self, figures: Figures) -> None:
        try:
            memory = self._redis.info("memory")
        except ResponseError:  # a user without the right to ask
            return
        figures.add("cellama_redis_memory_bytes", float(memory["used_memory"]))
        figures.add("cellama_redis_memory_limit_bytes", float(memory.get("maxmemory", 0)))


def _add_workers(figures: Figures, workers: list[WorkerEntry]) -> None:
    figures.add("cellama_workers", len(workers))
    if workers:
        figures.add("cellama_worker_age_seconds", max(worker.age_s for worker in workers))


def add_ledger(redis: Redis, figures: Figures, now: float) -> None:
    """Add the sizes of the ledger's sets at this time of Redis' clock. Raises RedisError."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.zcard(leases_key())
    pipeline.zcount(leases_key(), "-inf", now)
    pipeline.zrange(leases_key(), 0, 0, withscores=True)
    pipeline.zcount(due_key(), "-inf", now)
    pipeline.zrange(due_key(), 0, 0, withscores=True)
    pipeline.zcard(missing_key())
    pipeline.zcard(dead_key())
    found: list[Any] = pipeline.execute()
    leases, overdue, first_to_end, due, first_due, missing, dead = found
    figures.add("cellama_ledger_leases", leases)
    figures.add("cellama_ledger_leases_overdue", overdue)
    figures.add("cellama_ledger_leases_overdue_seconds", _late(first_to_end, now))
    figures.add("cellama_ledger_due", due)
    figures.add("cellama_ledger_due_seconds", _late(first_due, now))
    figures.add("cellama_ledger_missing", missing)
    figures.add("cellama_dead_jobs", dead)


def _late(first: list[tuple[bytes, float]], now: float) -> float:
    """Return the seconds since the time of the first entry; 0 if it has not come, or there is no entry."""
    return max(0.0, now - first[0][1]) if first else 0.0


def add_bulk_runs(redis: Redis, figures: Figures) -> bool:
    """Add bulk runs; an unknown state is `other`. Returns True if more than MOST_RUNS are active. Raises RedisError."""
    for state in STATES:
        figures.add("cellama_bulk_runs", 0, state)
    runs = Batches(redis).all(MOST_RUNS + 1)
    for run in runs[:MOST_RUNS]:
        figures.add("cellama_bulk_runs", 1, run["state"] if run.get("state") in STATES else "other")
        if run["alive"]:
            total, done, failed = (_count(run.get(name)) for name in ("total", "finished", "failed"))
            figures.add("cellama_bulk_lines", done, "done")
            figures.add("cellama_bulk_lines", failed, "failed")
            figures.add("cellama_bulk_lines", max(0, total - done - failed), "left")
    return any(run["alive"] for run in runs[MOST_RUNS:])


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def add_tenants(redis: Redis, figures: Figures, now: float) -> bool:
    """Add the tenants of the first active keys by id. Returns True if there are more. Raises RedisError."""
    told: Any = redis.hgetall(api_keys_key())
    found = [entry for raw in told.values() if (entry := _parsed(raw)) is not None and entry.state(now) == "active"]
    entries = sorted(found, key=lambda entry: entry.id)[:MOST_KEYS]
    pipeline = redis.pipeline(transaction=False)
    for entry in entries:
        pipeline.zcount(key_jobs_key(entry.id), now, "+inf")
        pipeline.hget(key_charges_key(entry.id), "tokens")
    answers = iter(pipeline.execute())
    for entry in entries:
        jobs, tokens = next(answers), next(answers)
        figures.add("cellama_tenant_jobs", jobs, entry.tenant)
        figures.add("cellama_tenant_window_tokens", float(tokens or 0), entry.tenant)
    return len(found) > MOST_KEYS


def _parsed(raw: bytes) -> KeyEntry | None:
    try:
        return KeyEntry.model_validate_json(raw)
    except ValidationError:  # the gateway says so in its log
        return None

"""All figures that come from Redis, read at most once a second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from cellama.tasks.connection.redis_clock import redis_time
from cellama.tasks.metrics.families import Figures
from cellama.tasks.state.registry import WorkerEntry, live_workers

from .bulk import add_bulk_runs
from .ledger import add_ledger
from .queues import add_queues
from .tenants import add_tenants

log = logging.getLogger(__name__)

KEPT_S = 1.0  # what was read is told again for so long: several who scrape cost as much as one


class Scrape:
    """One thread calls it: that of the server."""

    def __init__(self, redis: Redis, now: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._now = now
        self._read_at: float | None = None
        self._figures = Figures()
        self.is_up = True  # Redis answered the last time

    def __call__(self) -> Figures:
        """All figures; only `cellama_up`, which is 0, if Redis does not answer."""
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
                log.warning("there are no figures while Redis does not answer: %s", error)
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

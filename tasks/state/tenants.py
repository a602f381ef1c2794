"""Count the jobs and the recent service of each tenant for display (docs/fair-share.md).

When a job ends, its worker adds the job's cost to the current period. A period is a sorted set of fairness keys.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from redis import Redis

from cellama.tasks.connection.connections import redis_time
from cellama.tasks.contract.keys import backlog_key, job_key, queues_key, running_key, service_key
from cellama.tasks.contract.names import PRIORITIES, queue_key

from .fair_shares import limits, weights
from .scripts import run_script

PERIOD_S = 300  # seconds of service in one sorted set, so that the sum of an hour is 0 to 5 minutes late
NUM_PERIODS = 12  # an hour
MAX_SERVED = 10_000  # fairness keys per period, those with the most service; they take about 1 MB
MAX_WAITING = 2_000  # fairness keys per list that are counted, which takes a few milliseconds
MAX_RUNNING = 2_000  # running jobs that are counted, those of several hundred workers


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The jobs and the service of a fairness key, excluding the keys below it."""

    key: str  # fairness key; empty for jobs without a key
    weight: float  # weight among the keys below the same parent
    num_waiting: int  # jobs that no worker holds
    num_running: int  # jobs that have a slot
    service: float  # cost of the jobs that ended in the last hour, in generated tokens


@dataclass(frozen=True, slots=True)
class QueueShare:
    """The waiting jobs of a fairness key in a queue."""

    queue: str
    priority: int
    key: str
    num_waiting: int


class ServiceWriter:
    """Adds the service of one worker's jobs to Redis. Any thread may call `note`. The registry thread calls `flush`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._lock = threading.Lock()
        self._unsaved: Counter[str] = Counter()

    def note(self, key: str, tokens: float) -> None:
        """Record the cost of a job that has ended."""
        with self._lock:
            self._unsaved[key] += tokens  # type: ignore[assignment]  # a Counter can have fractions

    def flush(self) -> None:
        """Write the new costs.

        If this call raises RedisError, the costs are lost, which only affects the displayed figures.
        """
        with self._lock:
            costs, self._unsaved = self._unsaved, Counter()
        if not costs:
            return
        period = service_key(int(redis_time(self._redis) // PERIOD_S))
        pipeline = self._redis.pipeline(transaction=False)
        for key, tokens in costs.items():
            pipeline.zincrby(period, tokens, key)
        pipeline.zremrangebyrank(period, 0, -MAX_SERVED - 1)
        pipeline.expire(period, (NUM_PERIODS + 2) * PERIOD_S)
        pipeline.execute()


def tenant_shares(redis: Redis) -> list[TenantShare]:
    """Return the tenants that have jobs, had service in the last hour, or have a weight or a limit. Raises RedisError.

    Tenants with the most service come first.
    """
    weight_of, service, running = weights(redis), _service(redis), _running(redis)
    limited = {name for name in limits(redis) if not name.startswith("/")}
    waiting: Counter[str] = Counter()
    for share in queue_shares(redis):
        waiting[share.key] += share.num_waiting
    found = [
        TenantShare(key, weight_of.get(key, 1.0), waiting[key], running[key], service[key])
        for key in {*weight_of, *limited, *service, *running, *waiting}
    ]
    return sorted(found, key=lambda share: (-share.service, -share.num_waiting, -share.num_running, share.key))


def queue_shares(redis: Redis) -> list[QueueShare]:
    """Return the fairness keys with waiting jobs, by queue, priority and key. Raises RedisError."""
    queues: Any = redis.smembers(queues_key())
    places = [(queue, priority) for queue in sorted(raw.decode() for raw in queues) for priority in PRIORITIES]
    pipeline = redis.pipeline(transaction=False)
    for queue, priority in places:
        pipeline.exists(backlog_key(queue_key(queue, priority)))
    shares = []
    for (queue, priority), has_jobs in zip(places, pipeline.execute(), strict=True):
        if has_jobs:
            backlog = backlog_key(queue_key(queue, priority))
            found: Any = run_script(redis, "waiting_by_key", [backlog], [MAX_WAITING])
            pairs = zip(found[::2], found[1::2], strict=True)
            shares += [QueueShare(queue, priority, key.decode(), count) for key, count in pairs]
    return shares


def of_tenant(shares: Iterable[TenantShare], key: str) -> list[TenantShare]:
    """Return the shares of a fairness key and of all keys below it."""
    return [share for share in shares if share.key == key or (key and share.key.startswith(f"{key}/"))]


def _service(redis: Redis) -> Counter[str]:
    now = int(redis_time(redis) // PERIOD_S)
    pipeline = redis.pipeline(transaction=False)
    for period in range(now - NUM_PERIODS + 1, now + 1):
        pipeline.zrange(service_key(period), 0, -1, withscores=True)
    service: Counter[str] = Counter()
    for found in pipeline.execute():
        for raw, tokens in found:
            service[raw.decode()] += tokens
    return service


def _running(redis: Redis) -> Counter[str]:
    ids: Any = redis.zrange(running_key(), 0, MAX_RUNNING - 1)
    pipeline = redis.pipeline(transaction=False)
    for raw in ids:
        pipeline.hget(job_key(raw.decode()), "fairness_key")
    return Counter((raw or b"").decode() for raw in pipeline.execute())

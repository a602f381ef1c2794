"""The ledger: leases, what is due, what is missing, what is dead."""

from __future__ import annotations

from typing import Any

from redis import Redis

from cellama.tasks.contract.keys import DEAD_KEY, DUE_KEY, LEASES_KEY, MISSING_KEY
from cellama.tasks.metrics.families import Figures


def add_ledger(redis: Redis, figures: Figures, now: float) -> None:
    """Adds how much of each there is, at this time of Redis' clock. Raises RedisError."""
    pipeline = redis.pipeline(transaction=False)
    pipeline.zcard(LEASES_KEY)
    pipeline.zcount(LEASES_KEY, "-inf", now)
    pipeline.zrange(LEASES_KEY, 0, 0, withscores=True)
    pipeline.zcount(DUE_KEY, "-inf", now)
    pipeline.zrange(DUE_KEY, 0, 0, withscores=True)
    pipeline.zcard(MISSING_KEY)
    pipeline.zcard(DEAD_KEY)
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
    """How long ago the first one's time was; 0 if it is to come, or there is none."""
    return max(0.0, now - first[0][1]) if first else 0.0

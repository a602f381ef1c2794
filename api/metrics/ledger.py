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
    pipeline.zcount(DUE_KEY, "-inf", now)
    pipeline.zrange(DUE_KEY, 0, 0, withscores=True)
    pipeline.zcard(MISSING_KEY)
    pipeline.zcard(DEAD_KEY)
    found: list[Any] = pipeline.execute()
    leases, overdue, due, first, missing, dead = found
    figures.add("cellama_ledger_leases", leases)
    figures.add("cellama_ledger_leases_overdue", overdue)
    figures.add("cellama_ledger_due", due)
    figures.add("cellama_ledger_due_seconds", max(0.0, now - first[0][1]) if first else 0.0)
    figures.add("cellama_ledger_missing", missing)
    figures.add("cellama_dead_jobs", dead)

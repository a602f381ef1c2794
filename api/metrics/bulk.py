"""Bulk runs: how many, and how much of the open ones is left."""

from __future__ import annotations

from redis import Redis

from cellama.tasks.metrics.families import Figures
from cellama.tasks.state.bulk_runs import OPEN_STATES, Batches

MOST_RUNS = 100  # the last ones by their last word
STATES = (*sorted(OPEN_STATES), "completed", "failed", "cancelled", "expired")


def add_bulk_runs(redis: Redis, figures: Figures) -> bool:
    """A state that this version does not know is `other`. True if more than these are at work. Raises RedisError."""
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

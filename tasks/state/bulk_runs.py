"""Records of bulk runs in Redis, to list, watch and cancel them from anywhere. A run's command writes its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from redis import Redis

from cellama.tasks.connection.redis_clock import redis_time, seconds_of
from cellama.tasks.contract.keys import batch_key, batches_key

KEPT_S = 30 * 86400  # after the last sign of life of a run
OPEN_STATES = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_TEXTS = frozenset({"state", "input", "output", "model"})  # a model may be called 7
SILENT_S = 15.0  # a command that runs writes more often


class Batches:
    """The records of all runs."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def write(self, run_id: str, **facts: Any) -> None:
        """Write facts about a run, and that its command is alive."""
        now = redis_time(self._redis)
        values: Any = {name: "" if value is None else str(value) for name, value in facts.items()}
        with self._redis.pipeline() as pipe:
            pipe.hset(batch_key(run_id), mapping={**values, "at": now})
            pipe.hsetnx(batch_key(run_id), "created_at", str(now))
            pipe.expire(batch_key(run_id), KEPT_S)
            pipe.zadd(batches_key(), {run_id: now})
            pipe.zremrangebyscore(batches_key(), 0, now - KEPT_S)
            pipe.execute()

    def read(self, run_id: str) -> dict[str, Any] | None:
        """Return all facts about a run, or None if there is none. `alive` is whether a command works on it."""
        return next(iter(self._read([run_id])), None)

    def _read(self, run_ids: Iterable[str]) -> list[dict[str, Any]]:
        """Return the facts about the runs that exist."""
        named, pipeline = list(run_ids), self._redis.pipeline(transaction=False)
        pipeline.time()
        for run_id in named:
            pipeline.hgetall(batch_key(run_id))
        now, *found = pipeline.execute()
        return [_facts(run_id, told, seconds_of(now)) for run_id, told in zip(named, found, strict=True) if told]

    def all(self, most: int = 0) -> list[dict[str, Any]]:
        """Return up to `most` runs (0: all), the last one first."""
        ids: Any = self._redis.zrevrange(batches_key(), 0, most - 1)
        return self._read(run_id.decode() for run_id in ids)

    def cancel(self, run_id: str) -> None:
        """Cancel a run: its command ends it, or it is cancelled now if no command works on it."""
        self._redis.hset(batch_key(run_id), "cancel", "1")
        facts = self.read(run_id)
        if facts is not None and not facts["alive"]:
            self.write(run_id, state="cancelled")

    def forget(self, run_id: str) -> None:
        """Remove the record of a run."""
        self._redis.delete(batch_key(run_id))
        self._redis.zrem(batches_key(), run_id)

    def take_cancel(self, run_id: str) -> bool:
        """Return whether a cancellation was requested since the last call."""
        return bool(self._redis.hdel(batch_key(run_id), "cancel"))


def _facts(run_id: str, told: Mapping[bytes, bytes], now: float) -> dict[str, Any]:
    facts = {name.decode(): _parsed(name.decode(), value.decode()) for name, value in told.items()}
    alive = facts.get("state") in OPEN_STATES and now - facts["at"] < SILENT_S
    return {"id": run_id, **facts, "alive": alive}


def _parsed(name: str, value: str) -> Any:
    if name in _TEXTS:
        return value or None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value or None

"""Store records of bulk runs in Redis, so that any process can list, watch and cancel runs.

The command that executes a run writes the run's record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from redis import Redis

from cellama.tasks.connection.connections import redis_time, seconds_of
from cellama.tasks.contract.keys import batch_key, batches_key

RECORD_TTL_S = 30 * 86400  # after the last write of the run's command
OPEN_STATES = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_TEXT_FIELDS = frozenset({"state", "input", "output", "model"})  # never parsed as numbers: a model can be named 7
ALIVE_S = 15.0  # a command that has not written for this long has stopped


class Batches:
    """Reads and writes the records of all runs."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def write(self, run_id: str, **fields: Any) -> None:
        """Write fields of a run's record, and the current time, which shows that the run's command is alive."""
        now = redis_time(self._redis)
        values: Any = {name: "" if value is None else str(value) for name, value in fields.items()}
        with self._redis.pipeline() as pipe:
            pipe.hset(batch_key(run_id), mapping={**values, "at": now})
            pipe.hsetnx(batch_key(run_id), "created_at", str(now))
            pipe.expire(batch_key(run_id), RECORD_TTL_S)
            pipe.zadd(batches_key(), {run_id: now})
            pipe.zremrangebyscore(batches_key(), 0, now - RECORD_TTL_S)
            pipe.execute()

    def read(self, run_id: str) -> dict[str, Any] | None:
        """Return a run's record, or None if the record is missing.

        `alive` is True if a command is working on the run.
        """
        return next(iter(self._read([run_id])), None)

    def _read(self, run_ids: Iterable[str]) -> list[dict[str, Any]]:
        """Return the records of these runs. Runs without a record are omitted."""
        ids, pipeline = list(run_ids), self._redis.pipeline(transaction=False)
        pipeline.time()
        for run_id in ids:
            pipeline.hgetall(batch_key(run_id))
        now, *found = pipeline.execute()
        return [_record(run_id, fields, seconds_of(now)) for run_id, fields in zip(ids, found, strict=True) if fields]

    def all(self, limit: int = 0) -> list[dict[str, Any]]:
        """Return the records of up to `limit` runs, latest first. A `limit` of 0 returns all records."""
        ids: Any = self._redis.zrevrange(batches_key(), 0, limit - 1)
        return self._read(run_id.decode() for run_id in ids)

    def cancel(self, run_id: str) -> None:
        """Request the cancellation of a run. If no command is working on the run, also set its state to cancelled."""
        self._redis.hset(batch_key(run_id), "cancel", "1")
        record = self.read(run_id)
        if record is not None and not record["alive"]:
            self.write(run_id, state="cancelled")

    def forget(self, run_id: str) -> None:
        """Remove the record of a run."""
        self._redis.delete(batch_key(run_id))
        self._redis.zrem(batches_key(), run_id)

    def take_cancel(self, run_id: str) -> bool:
        """Return whether the run's cancellation was requested since the last call of this method."""
        return bool(self._redis.hdel(batch_key(run_id), "cancel"))


def _record(run_id: str, fields: Mapping[bytes, bytes], now: float) -> dict[str, Any]:
    record = {name.decode(): _parsed(name.decode(), value.decode()) for name, value in fields.items()}
    alive = record.get("state") in OPEN_STATES and now - record["at"] < ALIVE_S
    return {"id": run_id, **record, "alive": alive}


def _parsed(name: str, value: str) -> Any:
    if name in _TEXT_FIELDS:
        return value or None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value or None

"""Record which models each pool's workers serve, so that the record is available after the last worker has stopped.

`cellama autoscale` reads this record to start the first worker of a pool.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from redis import Redis

from cellama.tasks.contract.keys import pools_key

if TYPE_CHECKING:
    from cellama.engine import ModelManager

POOLS_TTL_S = 30 * 86400  # like the samples of service times, without which this record is of little use
REWRITE_S = 3600.0  # an unchanged record is written again after this time, so that it does not expire


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolModel:
    """A model on the workers of a pool. `slots` is 0 and `load_s` is 0.0 if no worker has loaded the model yet."""

    slots: int = 0
    load_s: float = 0.0
    is_default: bool = False


class PoolRecorder:
    """Records the models of one worker's pool. Only the registry thread calls `write`."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        configured: Iterable[str],
        manager: ModelManager,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the recorder. `configured` contains the ids of the models in the worker's settings."""
        self._redis = redis
        self._pool = pool
        self._configured = tuple(configured)
        self._manager = manager
        self._now = now
        self._written: dict[str, PoolModel] = {}
        self._written_at = 0.0

    def write(self) -> None:
        """Write the record if it has changed or is an hour old. Raises RedisError."""
        models = dict.fromkeys(self._configured, PoolModel()) | self._loaded()
        if models == self._written and self._now() - self._written_at < REWRITE_S:
            return
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hset(pools_key(), self._pool, json.dumps({name: asdict(model) for name, model in models.items()}))
        pipeline.expire(pools_key(), POOLS_TTL_S)
        pipeline.execute()
        self._written, self._written_at = models, self._now()

    def _loaded(self) -> dict[str, PoolModel]:
        """Return the ready models. Models that were unloaded again keep the values of their last load."""
        known = {name: model for name, model in self._written.items() if name in self._configured}
        default = self._manager.default
        for entry in self._manager.entries():
            if entry.model is not None and entry.status == "ready":
                engine = entry.model.snapshot().engine
                known[entry.id] = PoolModel(
                    slots=engine.slots_total if engine else 0,
                    load_s=round(entry.model.load_s, 3),
                    is_default=entry.id == default,
                )
        return known


def recorded_pools(redis: Redis) -> dict[str, dict[str, PoolModel]]:
    """Return the recorded models by pool and model id. Malformed records are skipped. Raises RedisError."""
    stored: Any = redis.hgetall(pools_key())
    pools = {}
    for pool, data in stored.items():
        try:
            pools[pool.decode()] = {name: PoolModel(**values) for name, values in json.loads(data).items()}
        except (ValueError, TypeError, AttributeError):
            continue
    return pools

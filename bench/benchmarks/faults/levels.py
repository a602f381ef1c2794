"""What a worker and its Redis must be back at when all jobs have ended."""

from __future__ import annotations

from dataclasses import dataclass

from redis import Redis

from cellama.tasks.contract.keys import LOOKED_KEY
from cellama.tasks.state.registry import live_workers


@dataclass(frozen=True)
class Level:
    """What must be the same before and after."""

    slots_busy: int
    rss: int  # bytes of the worker
    keys: frozenset[str]  # that never expire


def slots_busy(redis: Redis) -> int:
    """Of all workers, as they have told."""
    engines = [model["engine"] for entry in live_workers(redis) for model in entry.models]
    return sum(engine["slots_prefilling"] + engine["slots_decoding"] for engine in engines if engine)


def lasting_keys(redis: Redis) -> frozenset[str]:
    """Keys that never expire: what jobs leave for good."""
    keys = list(redis.scan_iter(count=1000))
    pipeline = redis.pipeline(transaction=False)
    for key in keys:
        pipeline.ttl(key)
    lasting = {key.decode() for key, ttl in zip(keys, pipeline.execute(), strict=True) if ttl == -1}
    return frozenset(lasting - {LOOKED_KEY})

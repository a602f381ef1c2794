"""What a worker asks Redis about itself before it takes jobs: it refuses a cluster, and warns of lost jobs to come."""

from __future__ import annotations

import logging
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError, RedisError, TimeoutError as RedisTimeoutError

log = logging.getLogger(__name__)

CLUSTER = (
    "CELLAMA_REDIS_URL names a node of a Redis Cluster, where the keys of one job may lie on different nodes; "
    "use a single server, or one with replicas and sentinels (docs/redis.md)"
)


class UnfitRedis(Exception):
    """This Redis can't serve; the message says why."""


class ServerCheck:
    """One check in the life of a worker: at its start, or when Redis answers for the first time."""

    def __init__(self) -> None:
        self._done = False

    def run(self, redis: Redis) -> None:
        """Warns, once, of what may lose jobs. Raises UnfitRedis."""
        if self._done:
            return
        try:
            info: Any = redis.info()
        except (RedisConnectionError, RedisTimeoutError):
            return  # later
        except RedisError as error:
            log.warning("Redis does not say how it is set up, so that is not checked: %s", error)
            info = {}
        self._done = True
        if info.get("cluster_enabled"):
            raise UnfitRedis(CLUSTER)
        for warning in warnings_of(info):
            log.warning("%s", warning)


def warnings_of(info: dict[str, Any]) -> list[str]:
    """What may lose jobs, one sentence each; `info` is what Redis' INFO says."""
    warnings = []
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        warnings.append(
            f"Redis may drop jobs, results and streams when its memory is full (maxmemory-policy {policy}); "
            "set it to noeviction"
        )
    if not info.get("aof_enabled", 1):
        warnings.append(
            "Redis has no append-only file: a crash or a restart of it loses the jobs since its last snapshot, "
            "or all of them; set appendonly to yes"
        )
    return warnings

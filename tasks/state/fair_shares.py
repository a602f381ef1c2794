"""Read the service of tenants, and set their weights and limits (docs/fair-share.md).

All functions can raise RedisError.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from redis import Redis

from cellama.config import get_settings
from cellama.tasks.contract.fairness import limit_name
from cellama.tasks.contract.keys import backlog_key, idle_key, queues_key, shares_key, slots_key, terms_key
from cellama.tasks.contract.names import PRIORITIES, queue_key

from .scripts import run_script

MAX_TICKETS = 100  # pushed when a limit is raised; the reaper pushes the others
LIMIT = "\0"  # first character of a field of `terms_key` with a limit


@dataclass(frozen=True, slots=True)
class WaitingShare:
    """The waiting jobs of a fairness key in a queue, and the service of the key in tokens per weight.

    The next job of a level is that of the key with the least service. Services of different levels, queues and
    priorities can't be compared.
    """

    queue: str
    priority: int
    key: str
    num_waiting: int
    service: float


def set_weight(redis: Redis, key: str, weight: float | None) -> None:
    """Set the weight of a fairness key for all workers, or return to the one in the settings if it is None."""
    if weight is None:
        redis.hdel(terms_key(), key)
    else:
        redis.hset(terms_key(), key, repr(weight))


def weights(redis: Redis) -> dict[str, float]:
    """Return the weights that differ from 1: those of this machine's settings, replaced by those in Redis."""
    stored: Any = redis.hgetall(terms_key())
    found = {name.decode(): float(value) for name, value in stored.items()}
    return {**get_settings().fairness_weights, **{key: found[key] for key in found if not key.startswith(LIMIT)}}


def set_limit(redis: Redis, name: str, limit: int | None) -> None:
    """Set how many jobs of a name (`limit_name`) workers may hold at the same time.

    0 means unlimited, and None returns to the limit in the settings.
    """
    run_script(redis, "set_limit", [], [name, "" if limit is None else limit, min(limit or MAX_TICKETS, MAX_TICKETS)])


def limits(redis: Redis) -> dict[str, int]:
    """Return the limits by name (`limit_name`): those of this machine's settings, replaced by those in Redis."""
    settings = get_settings()
    found = {**settings.fairness_limits, **{limit_name(model=m): n for m, n in settings.model_limits.items()}}
    stored: Any = redis.hgetall(terms_key())
    for name, value in stored.items():
        if name.decode().startswith(LIMIT):
            found[name.decode().removeprefix(LIMIT)] = int(value)
    return {name: limit for name, limit in found.items() if limit}


def num_held(redis: Redis, name: str) -> int:
    """Return how many jobs count against the limit of a name (`limit_name`)."""
    return int(redis.scard(slots_key(name)))


def waiting_shares(redis: Redis) -> list[WaitingShare]:
    """Return the fairness keys that have waiting jobs, by queue, priority and key."""
    queues: Any = redis.smembers(queues_key())
    shares: list[WaitingShare] = []
    for queue in sorted(raw.decode() for raw in queues):
        for priority in PRIORITIES:
            list_key = queue_key(queue, priority)
            for key, service in sorted(_keys_below(redis, list_key, "")):
                num_waiting: Any = redis.zlexcount(backlog_key(list_key), f"[{key}\0", f"({key}\1")
                shares.append(WaitingShare(queue, priority, key, num_waiting, service))
    return shares


def _keys_below(redis: Redis, list_key: str, node: str) -> Iterator[tuple[str, float]]:
    """Yield the fairness keys below a node, each with its service."""
    children: Any = redis.zrange(f"{shares_key(list_key)}\0{node}", 0, -1, withscores=True)
    for raw, service in children:
        child = raw.decode()
        if child.endswith("/"):
            yield from _keys_below(redis, list_key, child)
        elif service == float("inf"):  # it has reached its limit
            yield child, float(redis.zscore(f"{idle_key(list_key)}\0{node}", child) or 0)
        else:
            yield child, service

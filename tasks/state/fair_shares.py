"""Set the weights and limits of tenants (docs/fair-share.md).

All functions can raise RedisError.
"""

from __future__ import annotations

from typing import Any

from redis import Redis

from cellama.config import get_settings
from cellama.tasks.contract.fairness import limit_name
from cellama.tasks.contract.keys import slots_key, terms_key

from .scripts import run_script

MAX_TICKETS = 100  # pushed when a limit is raised; the reaper pushes the others
LIMIT = "\0"  # first character of a field of `terms_key` with a limit


def set_weight(redis: Redis, key: str, weight: float | None) -> None:
    """Set a fairness key's weight for all workers. If `weight` is None, restore the weight from the settings."""
    if weight is None:
        redis.hdel(terms_key(), key)
    else:
        redis.hset(terms_key(), key, repr(weight))


def weights(redis: Redis) -> dict[str, float]:
    """Return the weights that differ from 1. Weights in Redis override the weights in this machine's settings."""
    stored: Any = redis.hgetall(terms_key())
    found = {name.decode(): float(value) for name, value in stored.items()}
    return {**get_settings().fairness_weights, **{key: found[key] for key in found if not key.startswith(LIMIT)}}


def set_limit(redis: Redis, name: str, limit: int | None) -> None:
    """Set how many jobs with this name (`limit_name`) all workers together may hold at the same time.

    A limit of 0 means unlimited, and None restores the limit from the settings.
    """
    run_script(redis, "set_limit", [], [name, "" if limit is None else limit, min(limit or MAX_TICKETS, MAX_TICKETS)])


def limits(redis: Redis) -> dict[str, int]:
    """Return the limits, keyed by `limit_name`. Limits in Redis override the limits in this machine's settings."""
    settings = get_settings()
    found = {**settings.fairness_limits, **{limit_name(model=m): n for m, n in settings.model_limits.items()}}
    stored: Any = redis.hgetall(terms_key())
    for name, value in stored.items():
        if name.decode().startswith(LIMIT):
            found[name.decode().removeprefix(LIMIT)] = int(value)
    return {name: limit for name, limit in found.items() if limit}


def num_held(redis: Redis, name: str) -> int:
    """Return how many jobs count against a name's limit (`limit_name`)."""
    return int(redis.scard(slots_key(name)))

"""The endpoints that there are, in Redis. Nothing is cached."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError
from redis.asyncio import Redis

from cellama.tasks.connection.redis_clock import seconds_of
from cellama.tasks.contract.keys import webhooks_key

from .endpoint import Endpoint

log = logging.getLogger(__name__)

_REPLACE = "if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end"


class EndpointStore:
    """Methods raise RedisError."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def all(self) -> list[Endpoint]:
        """Every endpoint, the oldest first."""
        told: Any = await self._redis.hgetall(webhooks_key())
        found = [endpoint for value in told.values() if (endpoint := _parsed(value)) is not None]
        return sorted(found, key=_age)

    async def find(self, endpoint_id: str) -> Endpoint | None:
        """The endpoint of that id."""
        told: Any = await self._redis.hget(webhooks_key(), endpoint_id)
        return _parsed(told)

    async def write(self, endpoint: Endpoint) -> None:
        """Redis has it from now on, as it is here."""
        await self._redis.hset(webhooks_key(), endpoint.id, endpoint.model_dump_json(exclude_none=True))

    async def turn_off(self, endpoint: Endpoint) -> None:
        """It hears of nothing more, unless it was deleted meanwhile."""
        told = endpoint.model_copy(update={"state": "off"}).model_dump_json(exclude_none=True)
        await self._redis.eval(_REPLACE, 1, webhooks_key(), endpoint.id, told)

    async def delete(self, endpoint_id: str) -> bool:
        """It hears of nothing more, also not of what waits for it. False if there was none."""
        return bool(await self._redis.hdel(webhooks_key(), endpoint_id))

    async def now(self) -> datetime:
        """By Redis' clock."""
        return datetime.fromtimestamp(int(seconds_of(await self._redis.time())), UTC)


def _age(endpoint: Endpoint) -> tuple[float, str]:
    return (0.0 if endpoint.created_at is None else endpoint.created_at.timestamp(), endpoint.id)


def _parsed(told: bytes | None) -> Endpoint | None:
    """None also for what is no endpoint, or says more than this version knows."""
    if told is None:
        return None
    try:
        return Endpoint.model_validate_json(told)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        log.error("an entry of %s can't be read, so nothing is sent there: wrong are %s", webhooks_key(), places)
        return None

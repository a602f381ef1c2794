"""Leases: at most one gateway does a thing, and another one can when that gateway is gone."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cellama.tasks.contract.keys import http_lease_key

SHARE = 6  # a sixth of the lease passes between renewals, so five may fail; its holder stops a sixth before its end
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class GatewayLease:
    """A gateway's right to do a thing, for example to drive a batch: Redis has its token under the name of the thing.

    Methods raise RedisError. Any thread may read `is_held`.
    """

    def __init__(self, redis: Redis, name: str, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is for tests."""
        self.token = uuid.uuid4().hex
        self._redis: Any = redis
        self._key = http_lease_key(name)
        self._lease_s = lease_s
        self._clock = clock
        self._asked_at = float("-inf")

    @property
    def is_held(self) -> bool:
        """Whether it holds for sure. It becomes false some time before the lease ends in Redis."""
        return self._clock() < self._asked_at + self._lease_s * (1 - 1 / SHARE)

    @property
    def is_due(self) -> bool:
        """Whether it is time to renew it."""
        return self._clock() >= self._asked_at + self._lease_s / SHARE

    async def take(self) -> bool:
        """Return False if another gateway has it."""
        return await self._note(self._redis.set(self._key, self.token, nx=True, px=self._lease_ms))

    async def renew(self) -> bool:
        """Return False if it is lost for good."""
        return await self._note(self._redis.eval(_RENEW, 1, self._key, self.token, self._lease_ms))

    async def _note(self, asking: Any) -> bool:
        asked_at = self._clock()
        is_granted = bool(await asking)
        self._asked_at = asked_at if is_granted else float("-inf")
        return is_granted

    async def release(self) -> None:
        """Let another gateway take it at once. If Redis can't be reached, the lease ends by itself."""
        self.lose()
        try:
            await self._redis.eval(_RELEASE, 1, self._key, self.token)
        except RedisError:
            return

    def lose(self) -> None:
        self._asked_at = float("-inf")

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)


async def names_without_lease(redis: Redis, names: Sequence[str]) -> set[str]:
    """Return the names of which no gateway has a lease now. Raises RedisError."""
    if not names:
        return set()
    tokens: Any = await redis.mget([http_lease_key(name) for name in names])
    return {name for name, token in zip(names, tokens, strict=True) if token is None}

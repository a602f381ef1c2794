"""Leases, which ensure that only one gateway performs a task at a time.

If a gateway dies, another gateway takes over.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cellama.tasks.contract.keys import http_lease_key

RENEWALS_PER_LEASE = 6  # so five in a row may fail; the holder stops a sixth of the lease before it expires
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class GatewayLease:
    """One gateway's right to perform a task, such as driving a batch.

    Redis stores the lease's token under the lease's name. All methods may raise RedisError. `is_held` may be read from
    any thread.
    """

    def __init__(self, redis: Redis, name: str, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the lease without taking it. Tests may replace `clock`."""
        self.token = uuid.uuid4().hex
        self._redis: Any = redis
        self._key = http_lease_key(name)
        self._lease_s = lease_s
        self._clock = clock
        self._granted_at = float("-inf")  # when the last successful request was sent

    @property
    def is_held(self) -> bool:
        """Whether this gateway is certain to hold the lease.

        The value becomes False some time before the lease expires in Redis.
        """
        return self._clock() < self._granted_at + self._lease_s * (1 - 1 / RENEWALS_PER_LEASE)

    @property
    def is_due(self) -> bool:
        """Whether the lease should be renewed now."""
        return self._clock() >= self._granted_at + self._lease_s / RENEWALS_PER_LEASE

    async def take(self) -> bool:
        """Take the lease. Return False if another gateway holds the lease."""
        return await self._request(self._redis.set(self._key, self.token, nx=True, px=self._lease_ms))

    async def renew(self) -> bool:
        """Renew the lease. Return False if the lease has been lost."""
        return await self._request(self._redis.eval(_RENEW, 1, self._key, self.token, self._lease_ms))

    async def _request(self, reply: Any) -> bool:
        sent_at = self._clock()
        is_granted = bool(await reply)
        self._granted_at = sent_at if is_granted else float("-inf")
        return is_granted

    async def release(self) -> None:
        """Release the lease so that another gateway can take it immediately.

        If Redis does not answer, the lease expires by itself.
        """
        self.lose()
        try:
            await self._redis.eval(_RELEASE, 1, self._key, self.token)
        except RedisError:
            return

    def lose(self) -> None:
        """Mark the lease as lost without calling Redis."""
        self._granted_at = float("-inf")

    @property
    def _lease_ms(self) -> int:
        return int(self._lease_s * 1000)


async def names_without_lease(redis: Redis, names: Sequence[str]) -> set[str]:
    """Return the names of leases that no gateway holds. Raises RedisError."""
    if not names:
        return set()
    tokens: Any = await redis.mget([http_lease_key(name) for name in names])
    return {name for name, token in zip(names, tokens, strict=True) if token is None}

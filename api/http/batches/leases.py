"""Leases: at most one gateway does a thing, and another one can once it is gone."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cellama.api.http.files.records import Lease
from cellama.tasks.contract.keys import http_lease_key

SHARE = 6  # of a lease is the time between renewals, and between the end of a lease and when it ends for its holder
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class HeldLease:
    """A lease of this process. `is_held` may be asked by any thread."""

    def __init__(self, name: str, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease = Lease(name, uuid.uuid4().hex)
        self._lease_s = lease_s
        self._clock = clock
        self._until = float("-inf")

    @property
    def is_held(self) -> bool:
        """False from some time before its end on."""
        return self._clock() < self._until

    def renewed_at(self, asked_at: float) -> None:
        """Redis was asked at this time of the clock, at the earliest, and has renewed it."""
        self._until = asked_at + self._lease_s * (1 - 1 / SHARE)

    def lost(self) -> None:
        self._until = float("-inf")


class Leases:
    """For one event loop. Methods raise RedisError."""

    def __init__(self, redis: Redis, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is for tests."""
        self._redis = redis
        self._lease_s = lease_s
        self._clock = clock
        self._renew = redis.register_script(_RENEW)
        self._release = redis.register_script(_RELEASE)

    @property
    def renew_s(self) -> float:
        """How often a lease is to be renewed."""
        return self._lease_s / SHARE

    async def free(self, names: Sequence[str]) -> set[str]:
        """Those that no one has now."""
        if not names:
            return set()
        tokens: Any = await self._redis.mget([http_lease_key(name) for name in names])
        return {name for name, token in zip(names, tokens, strict=True) if token is None}

    async def take(self, name: str) -> HeldLease | None:
        """None if another one has it."""
        held, asked_at = HeldLease(name, self._lease_s, self._clock), self._clock()
        if not await self._redis.set(http_lease_key(name), held.lease.token, nx=True, px=self._ms):
            return None
        held.renewed_at(asked_at)
        return held

    async def renew(self, held: HeldLease) -> bool:
        """False if it is lost for good."""
        asked_at = self._clock()
        if await self._renew(keys=[http_lease_key(held.lease.name)], args=[held.lease.token, self._ms]):
            held.renewed_at(asked_at)
            return True
        held.lost()
        return False

    async def release(self, held: HeldLease) -> None:
        """Another one may have it at once. If Redis does not hear of it, it ends by itself."""
        held.lost()
        try:
            await self._release(keys=[http_lease_key(held.lease.name)], args=[held.lease.token])
        except RedisError:
            return

    @property
    def _ms(self) -> int:
        return int(self._lease_s * 1000)

"""Whose a batch, file or response is: for all other tenants its id is as good as none."""

from __future__ import annotations

from redis.asyncio import Redis

from cellama.api.http.callers import Caller
from cellama.api.http.errors import not_there
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.keys import owner_key
from cellama.tasks.contract.valid_text import valid_text

MAX_ID_CHARS = 64  # more than any id of ours has


class Owners:
    """Ids of things, and their tenants. Whoever has no tenant owns what no tenant does.

    Methods raise RedisUnreachable, RedisRefused.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def claim(self, thing_id: str, caller: Caller, ttl_s: int) -> None:
        """The thing is the caller's for so long: at least as long as the thing is kept. The same call may come again.

        Raises ApiError (404) if another tenant has that id.
        """
        if caller.tenant is not None:
            with reaching_redis():
                if await self._redis.set(owner_key(thing_id), caller.tenant, nx=True, ex=ttl_s):
                    return
        await self.check(thing_id, caller)
        if caller.tenant is not None:
            with reaching_redis():
                await self._redis.expire(owner_key(thing_id), ttl_s)

    async def check(self, thing_id: str, caller: Caller, what: str = "object") -> None:
        """Raises ApiError (404) unless the thing is the caller's. What is not there at all looks alike."""
        if not await self._is_of(thing_id, caller):
            raise not_there(what, thing_id)

    async def forget(self, thing_id: str) -> None:
        """The thing is gone."""
        with reaching_redis():
            await self._redis.delete(owner_key(thing_id))

    async def _is_of(self, thing_id: str, caller: Caller) -> bool:
        """The id is what a client says, and need be none."""
        if len(thing_id) > MAX_ID_CHARS or valid_text(thing_id) != thing_id:
            return False
        with reaching_redis():
            owner = await self._redis.get(owner_key(thing_id))
        return bool(owner == (None if caller.tenant is None else caller.tenant.encode()))

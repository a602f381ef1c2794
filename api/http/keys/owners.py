"""Whose a job, batch, file or response is: for all other tenants its id is as good as none."""

from __future__ import annotations

from redis.asyncio import Redis

from cellama.api.http.callers import Caller
from cellama.api.http.errors import not_there
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.keys import owner_key
from cellama.tasks.contract.valid_text import valid_text

MAX_ID_CHARS = 512  # a job may have an id of its client's own


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
        if not await self.are_of([thing_id], caller):
            raise not_there(what, thing_id)

    async def are_of(self, thing_ids: list[str], caller: Caller) -> list[str]:
        """Those of the ids that are the caller's, in their order. They are what clients say, and need be no ids."""
        thing_ids = [thing_id for thing_id in thing_ids if _may_be_one(thing_id)]
        if not thing_ids:
            return []
        with reaching_redis():
            found = await self._redis.mget([owner_key(thing_id) for thing_id in thing_ids])
        tenant = None if caller.tenant is None else caller.tenant.encode()
        return [thing_id for thing_id, owner in zip(thing_ids, found, strict=True) if owner == tenant]

    async def forget(self, thing_id: str) -> None:
        """The thing is gone."""
        with reaching_redis():
            await self._redis.delete(owner_key(thing_id))


def _may_be_one(thing_id: str) -> bool:
    return len(thing_id) <= MAX_ID_CHARS and valid_text(thing_id) == thing_id

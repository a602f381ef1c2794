"""Ids of one tenant are as good as none for all others."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from cellama.api.http.callers import Caller
from cellama.api.http.errors import ApiError
from cellama.api.http.keys.owners import Owners
from cellama.tasks.contract.errors import RedisUnreachable

from .conftest import Run

ACME, OTHER, NO_TENANT = Caller("acme"), Caller("other"), Caller()


def test_things_of_a_tenant_are_there_for_itself_alone(run: Run) -> None:
    async def ask(redis: Redis) -> None:
        owners = Owners(redis)
        await owners.claim("batch_1", ACME, 100)
        await owners.claim("batch_1", ACME, 200)
        await owners.claim("batch_3", NO_TENANT, 100)
        await owners.check("batch_1", ACME)
        await owners.check("batch_3", NO_TENANT)
        assert 100 < await redis.ttl("cellama:owner:batch_1") <= 200
        told = []
        for caller, thing in ((OTHER, "batch_1"), (NO_TENANT, "batch_1"), (ACME, "batch_2")):
            with pytest.raises(ApiError) as raised:
                await owners.check(thing, caller, "batch")
            told.append((raised.value.status, raised.value.message.replace(thing, "")))
        assert set(told) == {(404, "there is no batch '', or not any more")}
        with pytest.raises(ApiError, match="404"):
            await owners.claim("batch_1", OTHER, 100)
        await owners.forget("batch_1")
        await owners.claim("batch_1", OTHER, 100)

    run(ask)


def test_without_redis_nothing_is_the_callers() -> None:
    async def ask() -> None:
        async with Redis.from_url("redis://127.0.0.1:1/0") as redis:
            for asked in (Owners(redis).check("a", ACME), Owners(redis).claim("a", ACME, 1), Owners(redis).forget("a")):
                with pytest.raises(RedisUnreachable):
                    await asked

    asyncio.run(ask())

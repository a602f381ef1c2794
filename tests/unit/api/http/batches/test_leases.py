"""At most one gateway has a lease; another one gets it when it is gone."""

from __future__ import annotations

from redis.asyncio import Redis

from cellama.api.http.batches.leases import SHARE, Leases
from cellama.tasks.contract.keys import http_lease_key

from ..conftest import Run

LEASE_S = 30.0


def test_lease_is_of_one_until_it_is_released(run: Run) -> None:
    async def ask(redis: Redis) -> None:
        here, there = Leases(redis, LEASE_S), Leases(redis, LEASE_S)
        held = await here.take("batch_1")
        assert held is not None
        assert held.is_held
        assert await there.take("batch_1") is None
        assert await there.free(["batch_1", "batch_2"]) == {"batch_2"}
        assert 0 < await redis.pttl(http_lease_key("batch_1")) <= LEASE_S * 1000
        assert await here.renew(held)
        await here.release(held)
        assert not held.is_held
        assert await there.take("batch_1") is not None

    run(ask)


def test_lease_that_another_one_has_taken_over_is_neither_renewed_nor_released_by_the_first(run: Run) -> None:
    async def ask(redis: Redis) -> None:
        here, there = Leases(redis, LEASE_S), Leases(redis, LEASE_S)
        first = await here.take("batch_1")
        assert first is not None
        await redis.delete(http_lease_key("batch_1"))  # it has ended: the gateway was stopped for so long
        second = await there.take("batch_1")
        assert second is not None
        assert not await here.renew(first)
        assert not first.is_held
        await here.release(first)
        assert await there.renew(second)

    run(ask)


def test_lease_does_not_count_for_its_holder_some_time_before_it_ends(run: Run) -> None:
    async def ask(redis: Redis) -> None:
        now = [100.0]
        held = await Leases(redis, LEASE_S, lambda: now[0]).take("batch_1")
        assert held is not None
        now[0] += LEASE_S * (1 - 1 / SHARE) - 0.1
        assert held.is_held
        now[0] += 0.2
        assert not held.is_held

    run(ask)

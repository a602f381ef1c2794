"""Test that only one gateway at a time holds a lease, and that another gateway can take it after it has ended."""

from __future__ import annotations

from redis.asyncio import Redis

from cellama.api.http.batches.leases import RENEWALS_PER_LEASE, GatewayLease, names_without_lease
from cellama.tasks.contract.keys import http_lease_key

from ..conftest import Run

LEASE_S = 30.0


def test_lease_has_one_holder_until_it_is_released(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        here, there = (GatewayLease(redis, "batch_1", LEASE_S) for _ in range(2))
        assert await here.take()
        assert here.is_held
        assert not await there.take()
        assert await names_without_lease(redis, ["batch_1", "batch_2"]) == {"batch_2"}
        assert 0 < await redis.pttl(http_lease_key("batch_1")) <= LEASE_S * 1000
        assert await here.renew()
        await here.release()
        assert not here.is_held
        assert await there.take()

    run(scenario)


def test_lease_is_neither_renewed_nor_released_when_another_gateway_holds_it(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        first, second = (GatewayLease(redis, "batch_1", LEASE_S) for _ in range(2))
        assert await first.take()
        await redis.delete(http_lease_key("batch_1"))  # it has expired, because the gateway was suspended
        assert await second.take()
        assert not await first.renew()
        assert not first.is_held
        await first.release()
        assert await second.renew()

    run(scenario)


def test_lease_no_longer_counts_as_held_shortly_before_it_expires(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        now = [100.0]
        lease = GatewayLease(redis, "batch_1", LEASE_S, lambda: now[0])
        assert await lease.take()
        assert not lease.is_due
        now[0] += LEASE_S / RENEWALS_PER_LEASE
        assert lease.is_due
        now[0] = 100.0 + LEASE_S * (1 - 1 / RENEWALS_PER_LEASE) - 0.1
        assert lease.is_held
        now[0] += 0.2
        assert not lease.is_held

    run(scenario)

"""Test the limits of a key with a fake clock: windows of 60 s, returned tokens, and leases."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings, strategies as st
from redis.asyncio import Redis

from cellama.api.http.keys.limiter import LEASE_S, WINDOW_S, LimitDecision, Limiter, Reservation

from .conftest import Run, key_and_entry


class Clock:
    """A clock that only moves when the test moves it."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class LimiterSetup:
    """A limiter with its key and its clock."""

    def __init__(self, redis: Redis, **limits: int) -> None:
        self.clock = Clock()
        self.limiter = Limiter(redis, self.clock)
        self.entry = key_and_entry(**limits)[1]

    async def admit(self, num_tokens: int = 1, num_jobs: int = 1) -> tuple[Reservation, LimitDecision]:
        """Charge a request, then its tokens and jobs, as a gateway does. A rejected request is settled."""
        reserved, verdict = await self.limiter.admit(self.entry)
        if verdict.is_admitted:
            reserved = replace(reserved, num_tokens=num_tokens, num_jobs=num_jobs)
            verdict = await self.limiter.reserve(self.entry, reserved)
            if not verdict.is_admitted:
                await self.limiter.settle(reserved, 0)
        return reserved, verdict

    async def verdict(self, num_tokens: int = 1) -> str:
        return (await self.admit(num_tokens))[1].verdict


def test_requests_per_minute_are_limited_in_a_sliding_window(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, requests_per_minute=2)
        assert await setup.verdict() == "in"
        setup.clock.now += 20
        assert await setup.verdict() == "in"
        _, refused = await setup.admit()
        assert (refused.verdict, refused.wait_s, refused.num_requests, refused.empty_in_s) == ("requests", 40, 2, 60)
        setup.clock.now += 39.9
        assert await setup.verdict() == "requests"
        setup.clock.now += 0.2
        assert [await setup.verdict(), await setup.verdict()] == ["in", "requests"]

    run(scenario)


def test_reserved_tokens_are_replaced_by_used_tokens(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, tokens_per_minute=100)
        first, _ = await setup.admit(80)
        _, refused = await setup.admit(30)
        assert (refused.verdict, refused.num_tokens, refused.wait_s) == ("tokens", 80, WINDOW_S)
        await setup.limiter.settle(first, 10)
        await setup.limiter.settle(first, 10)
        second, verdict = await setup.admit(90)
        assert (verdict.verdict, verdict.num_tokens) == ("in", 100)
        await setup.limiter.settle(second, 200)  # more than estimated
        assert (await setup.admit(1))[1].num_tokens == 210
        setup.clock.now += WINDOW_S
        assert await setup.verdict(100) == "in"

    run(scenario)


def test_tokens_beyond_the_reservation_count_when_request_ends_after_its_window(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, tokens_per_minute=100, requests_per_minute=2)
        first, _ = await setup.admit(10)
        setup.clock.now += 3 * WINDOW_S
        await setup.limiter.settle(first, 90)
        await setup.limiter.settle(first, 90)
        _, refused = await setup.admit(30)
        assert (refused.verdict, refused.num_tokens, refused.num_requests) == ("tokens", 80, 1)
        assert await setup.verdict(20) == "in"

    run(scenario)


def test_request_that_exceeds_the_whole_limit_is_rejected_permanently(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, tokens_per_minute=100)
        assert [await setup.verdict(101), await setup.verdict(100)] == ["too large", "in"]

    run(scenario)


def test_job_lease_ends_when_its_job_ends_or_its_gateway_dies(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, concurrent_jobs=2)
        first, _ = await setup.admit()
        await setup.admit()
        assert await setup.verdict() == "jobs"
        await setup.limiter.settle(first, 1)
        assert [await setup.verdict(), await setup.verdict()] == ["in", "jobs"]
        for _ in range(5):
            setup.clock.now += LEASE_S - 1
            await setup.limiter.renew()
        assert await setup.verdict() == "jobs"
        setup.clock.now += LEASE_S  # without a renewal
        assert [await setup.verdict(), await setup.verdict(), await setup.verdict()] == ["in", "in", "jobs"]

    run(scenario)


def test_request_holds_one_lease_per_job(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, concurrent_jobs=5)
        first, _ = await setup.admit(1, 3)
        said = [(await setup.admit(1, number))[1].verdict for number in (3, 6, 2, 1)]
        assert said == ["jobs", "too many", "in", "jobs"]
        setup.clock.now += LEASE_S - 1
        await setup.limiter.renew()
        setup.clock.now += LEASE_S - 1
        assert await setup.verdict() == "jobs"
        await setup.limiter.settle(first, 1)
        assert (await setup.admit(1, 3))[1].is_admitted

    run(scenario)


def test_request_counts_as_one_job_before_and_after_its_body_is_read(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, concurrent_jobs=2, requests_per_minute=100)
        first, _ = await setup.limiter.admit(setup.entry)
        second, _ = await setup.limiter.admit(setup.entry)
        assert await setup.verdict() == "jobs"
        assert (await setup.limiter.reserve(setup.entry, first)).is_admitted
        assert (await setup.limiter.reserve(setup.entry, replace(second, num_jobs=2))).verdict == "jobs"
        await setup.limiter.settle(first, 0)
        assert (await setup.limiter.reserve(setup.entry, replace(second, num_jobs=2))).is_admitted
        assert await setup.verdict() == "jobs"

    run(scenario)


def test_request_is_charged_once_when_body_arrives_after_its_window(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, requests_per_minute=1, tokens_per_minute=100)
        slow, _ = await setup.limiter.admit(setup.entry)
        setup.clock.now += WINDOW_S
        verdict = await setup.limiter.reserve(setup.entry, replace(slow, num_tokens=60))
        assert (verdict.verdict, verdict.num_requests, verdict.num_tokens) == ("in", 0, 60)
        await setup.limiter.settle(replace(slow, num_tokens=60), 10)
        _, verdict = await setup.admit(90)
        assert (verdict.verdict, verdict.num_requests, verdict.num_tokens) == ("in", 1, 100)

    run(scenario)


def test_lease_is_deleted_when_it_is_renewed_while_its_job_ends(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, concurrent_jobs=1)
        for _ in range(20):
            reserved, verdict = await setup.admit()
            assert verdict.is_admitted
            await asyncio.gather(setup.limiter.renew(), setup.limiter.settle(reserved, 1))

    run(scenario)


def test_request_counts_once_when_call_is_repeated_after_a_lost_reply(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr("uuid.uuid4", lambda: type("Same", (), {"hex": "same"}))

    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, requests_per_minute=2, tokens_per_minute=100, concurrent_jobs=1)
        for _ in range(3):
            _, verdict = await setup.admit(10)
            assert (verdict.verdict, verdict.num_requests, verdict.num_tokens) == ("in", 1, 10)

    run(scenario)


def test_all_redis_keys_for_limits_have_a_ttl(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, requests_per_minute=5, tokens_per_minute=100, concurrent_jobs=5)
        reserved, _ = await setup.admit(10)
        await setup.admit(10)
        setup.clock.now += 2 * WINDOW_S
        await setup.limiter.settle(reserved, 20)
        keys = await redis.keys()
        assert len(keys) == 3
        for key in keys:
            assert 0 < await redis.ttl(key) <= 2 * WINDOW_S

    run(scenario)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # each example has a key of its own
@given(st.lists(st.tuples(st.sampled_from(("admit", "end")), st.integers(1, 50), st.integers(0, 30)), max_size=40))
def test_limiter_agrees_with_a_brute_force_implementation(run: Run, steps: list[tuple[str, int, int]]) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, requests_per_minute=4, tokens_per_minute=100)
        log: list[list[float]] = []  # time, tokens and requests of each admitted charge
        running: list[tuple[Reservation, list[float]]] = []
        for what, num_tokens, seconds in steps:
            setup.clock.now += seconds
            inside = [entry for entry in log if entry[0] > setup.clock.now - WINDOW_S]
            if what == "end" and running:
                reserved, entry = running.pop(0)
                await setup.limiter.settle(reserved, num_tokens)
                if entry in inside:
                    entry[1] = num_tokens
                elif num_tokens > reserved.num_tokens:
                    log.append([setup.clock.now, num_tokens - reserved.num_tokens, 0])
                continue
            num_requests, num_taken = (sum(entry[at] for entry in inside) for at in (2, 1))
            reserved, verdict = await setup.admit(num_tokens)
            if num_requests >= 4 or num_taken > 100:
                assert not verdict.is_admitted
                continue
            log.append([setup.clock.now, 0, 1])
            assert verdict.is_admitted == (num_taken + num_tokens <= 100)
            if verdict.is_admitted:
                log.append([setup.clock.now, num_tokens, 0])
                running.append((reserved, log[-1]))

    run(scenario)


def test_rejected_request_is_admitted_after_its_wait(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        setup = LimiterSetup(redis, tokens_per_minute=100)
        for _ in range(4):
            await setup.admit(25)
            setup.clock.now += 3
        _, refused = await setup.admit(60)
        setup.clock.now += refused.wait_s + 0.001
        assert await setup.verdict(60) == "in"

    run(scenario)


def test_limits_of_different_keys_are_independent(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        one, other = LimiterSetup(redis, requests_per_minute=1), LimiterSetup(redis, requests_per_minute=1)
        assert [await one.verdict(), await other.verdict(), await one.verdict()] == ["in", "in", "requests"]

    run(scenario)

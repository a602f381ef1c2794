"""The simulated fleet takes jobs with the real scripts on a real Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.bench.benchmarks.service.fleet import fair_run
from cellama.bench.harness.fleet import BlockCache, Fleet, FleetShape
from cellama.bench.harness.traces import BLOCK, conversations

from ..conftest import empty_database


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[Redis]:
    with empty_database(redis_server, 9) as url, Redis.from_url(url) as redis:
        yield redis


def test_same_seed_produces_the_same_result(redis: Redis) -> None:
    def times() -> list[float]:
        redis.flushdb()
        jobs = Fleet(redis, FleetShape(num_workers=2)).run(conversations(20, per_s=0.1, seed=5))
        return [moment for job in jobs for moment in (job.submitted_at, job.first_token_at, job.ended_at)]

    assert times() == times()


def test_every_job_receives_all_of_its_tokens(redis: Redis) -> None:
    jobs = Fleet(redis, FleetShape(num_workers=2)).run(conversations(30, per_s=1.0, seed=6))
    assert len(jobs) == 30
    assert all(job.submitted_at < job.first_token_at < job.ended_at for job in jobs)
    assert sum(job.num_computed < job.num_prompt for job in jobs) > 3  # a prefix was cached


def test_block_cache_keeps_the_most_recently_used_blocks() -> None:
    cache = BlockCache(3 * BLOCK)
    assert cache.use([1, 2]) == 0
    assert cache.use([1, 3]) == 1
    assert cache.use([1, 4]) == 1  # evicts block 2
    assert cache.use([1, 2]) == 1


def test_service_received_by_waiting_tenants_differs_by_less_than_the_vtc_bound(redis: Redis) -> None:
    seeds = (*range(20), 209, 354, 952)  # the last ones start with jobs of very different costs
    gaps = [fair_run(redis, seed) for seed in seeds]
    assert [gap for gap in gaps if gap.largest > gap.bound] == []
    assert sum(gap.largest > 0 for gap in gaps) > 15

"""Read the work for each pool from the real ledger, with and without workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from redis import Redis
from typer.testing import CliRunner

from cellama.api.cli import app
from cellama.api.machine.redis_server import RedisServer
from cellama.api.metrics.scrape import Scrape
from cellama.config import get_settings
from cellama.tasks.connection.connections import redis_time
from cellama.tasks.contract.keys import pools_key, workers_key
from cellama.tasks.contract.names import DEFAULT_MODEL, queue_key, queue_name
from cellama.tasks.estimates.backlog import pool_demands
from cellama.tasks.estimates.samples import SampleWriter, class_of
from cellama.tasks.estimates.scaling import ScalingPolicy, wanted_workers
from cellama.tasks.metrics.exposition import text_of
from cellama.tasks.state.fair_shares import set_limit
from cellama.tasks.state.ledger import Ledger, work_of
from cellama.tasks.state.pools import PoolModel

from ..conftest import empty_database, worker_entry
from ..prometheus_text import sample
from .ledgers import submission

SLOTS, SPEED, LENGTH = 4, 10.0, 256  # of the last workers: tokens per second and slot, and tokens per job
WORK_S = LENGTH / SPEED / SLOTS  # of one job, on one worker
POOL = "gpu"


@pytest.fixture
def redis(redis_server: RedisServer, settings_environment: Callable[..., None]) -> Iterator[Redis]:
    """Return a database that the last workers of the pool `gpu` have left, with the pool's model and samples."""
    with empty_database(redis_server, 7) as url, Redis.from_url(url) as redis:
        settings_environment(redis_url=url)
        record(redis, m=PoolModel(slots=SLOTS, load_s=20.0, is_default=True))
        samples = SampleWriter(redis)
        work = work_of("cellama.generate", ["m", "Hi"], {"max_tokens": LENGTH})
        for queue in (queue_name("m"), queue_name(DEFAULT_MODEL)):
            samples.note(class_of(queue, work, 3), size=LENGTH, amount=LENGTH, speed=SPEED)
        samples.flush()
        yield redis


def record(redis: Redis, **models: PoolModel) -> None:
    redis.hset(pools_key(), POOL, json.dumps({name: asdict(model) for name, model in models.items()}))


def submit(redis: Redis, count: int, model: str = "m", **options: Any) -> None:
    Ledger(redis).submit([submission(queue_name(model), **options) for _ in range(count)])


def test_backlog_is_estimated_from_samples_when_no_worker_is_running(redis: Redis) -> None:
    assert pool_demands(redis)[POOL].num_jobs == 0
    submit(redis, 40)
    submit(redis, 8, DEFAULT_MODEL)
    demand = pool_demands(redis, startup_s=90.0)[POOL]
    assert (demand.num_jobs, demand.num_workers, demand.num_useful, demand.start_s) == (48, 0, 12, 110.0)
    assert demand.backlog_s == pytest.approx(48 * WORK_S)


def test_backlog_of_a_long_queue_is_extrapolated_from_a_sample(redis: Redis) -> None:
    submit(redis, 1000)
    demand = pool_demands(redis)[POOL]
    assert demand.num_jobs == 1000
    assert demand.backlog_s == pytest.approx(1000 * WORK_S, rel=0.01)


def test_backlog_is_unknown_when_no_similar_job_has_finished(redis: Redis) -> None:
    record(redis, other=PoolModel())
    submit(redis, 3, "other")
    demand = pool_demands(redis)[POOL]
    assert (demand.num_jobs, demand.backlog_s) == (3, None)


def test_first_worker_of_a_pool_is_started_for_the_models_in_the_settings(
    redis: Redis, settings_environment: Callable[..., None]
) -> None:
    assert set(pool_demands(redis)) == {POOL}
    settings_environment(redis_url=get_settings().redis_url, pool="new", models="own=bundled://tiny")
    submit(redis, 3, "own")
    assert wanted_workers(pool_demands(redis)["new"], ScalingPolicy()) == 1


def test_messages_of_plain_celery_need_a_worker(redis: Redis) -> None:
    redis.lpush(queue_key(queue_name("m"), 3), "{}")
    demand = pool_demands(redis)[POOL]
    assert (demand.num_jobs, demand.num_useful, demand.backlog_s) == (1, 1, None)


@pytest.mark.parametrize("limited", ["acme", "/cellama:queue:m"])
def test_jobs_above_a_limit_need_no_workers(redis: Redis, limited: str) -> None:
    submit(redis, 100, fairness_key="acme/search")
    assert pool_demands(redis)[POOL].num_useful == 25
    set_limit(redis, limited, 8)
    assert pool_demands(redis)[POOL].num_useful == 2


def test_pools_that_serve_the_same_model_share_its_jobs(redis: Redis) -> None:
    redis.hset(pools_key(), "cpu", json.dumps({"m": asdict(PoolModel(slots=2))}))
    submit(redis, 40)
    demands = pool_demands(redis)
    assert {pool: demands[pool].num_jobs for pool in (POOL, "cpu")} == {POOL: 20, "cpu": 20}
    assert demands["cpu"].backlog_s == pytest.approx(20 * LENGTH / SPEED / 2)


def test_live_workers_are_counted_and_idle_since_their_last_request(redis: Redis) -> None:
    engine = {"slots_total": SLOTS, "slots_decoding": 0, "generation_rate": 0.0}
    model = {"id": "m", "status": "ready", "default": True, "engine": engine, "load_s": 3.0, "ready_at": 5.0}
    now = redis_time(redis)
    entry = replace(worker_entry("w", {**model, "last_used_at": 970.0}, seen_at=now), at=1000.0, pool=POOL)
    redis.hset(workers_key(), "w", json.dumps(asdict(entry)))
    demand = pool_demands(redis)[POOL]
    assert (demand.num_workers, demand.start_s, demand.num_jobs) == (1, 3.0, 0)
    assert demand.idle_s == pytest.approx(30.0, abs=5.0)


def test_autoscale_prints_the_number_of_workers(redis: Redis) -> None:
    submit(redis, 48)
    argv = ["autoscale", "--pool", POOL, "--target-wait", "120", "--json"]
    found = json.loads(CliRunner().invoke(app, argv).stdout)
    assert (found["pool"], found["wanted"], found["num_jobs"]) == (POOL, 4, 48)  # 307 s of work, 100 s after loading
    assert json.loads(CliRunner().invoke(app, [*argv, "--max", "3"]).stdout)["wanted"] == 3
    rows = CliRunner().invoke(app, ["autoscale", "--target-wait", "120"]).stdout.splitlines()
    assert [row.split()[:4] for row in rows if POOL in row] == [[POOL, "4", "0", "48"]]


def test_metrics_contain_the_number_of_workers_when_no_worker_is_running(redis: Redis) -> None:
    now = 0.0
    scrape = Scrape(redis, lambda: now, scaling=ScalingPolicy(target_wait_s=120.0, scale_down_s=60.0))
    assert sample(text_of(scrape()).decode(), "cellama_wanted_workers", pool=POOL) == 0
    submit(redis, 48)
    now += 10.0
    text = text_of(scrape()).decode()
    assert sample(text, "cellama_wanted_workers", pool=POOL) == 4
    assert sample(text, "cellama_pool_workers", pool=POOL) == 0
    assert sample(text, "cellama_pool_backlog_seconds", pool=POOL) == pytest.approx(48 * WORK_S)
    assert sample(text, "cellama_workers") == 0

"""Test `cellama metrics`, whose values must match the data in Redis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import fakeredis
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from cellama.api.keys.entry import KeyEntry, new_key
from cellama.api.metrics import scrape as module
from cellama.api.metrics.scrape import Scrape
from cellama.tasks.connection.connections import redis_time
from cellama.tasks.contract import keys
from cellama.tasks.contract.names import CLASSES, queue_key, queue_name
from cellama.tasks.estimates.position import TEXT_SLOTS
from cellama.tasks.metrics.exposition import text_of
from cellama.tasks.state.bulk_runs import Batches
from cellama.tasks.state.tenants import ServiceWriter

from ....conftest import worker_entry
from ....prometheus_text import sample

READY: dict[str, Any] = {
    "id": "m", "status": "ready", "source": "", "default": False, "capabilities": ["generate"], "engine": None,
    "embedder": None, "reranker": None,
}  # fmt: skip


@pytest.fixture
def redis() -> Iterator[fakeredis.FakeRedis]:
    with fakeredis.FakeRedis(server=fakeredis.FakeServer()) as redis:
        yield redis


def wait(redis: Any, model: str, priority: int, age_s: float, name: str) -> None:
    """Queue a job that has been waiting for `age_s` seconds."""
    queue, at = queue_name(model), redis_time(redis) - age_s
    redis.zadd(keys.waiting_key(queue), {name: keys.waiting_score(priority, at)})
    redis.sadd(keys.queues_key(), queue)
    redis.lpush(queue_key(queue, priority), name)
    redis.hset(keys.job_key(name), mapping={"queue": queue, "priority": priority})


def value(scrape: Scrape, name: str, **labels: str) -> float | None:
    return sample(text_of(scrape()).decode(), name, **labels)


def test_scrape_counts_queued_jobs_by_model_and_class(redis: Any) -> None:
    for name, priority, age_s in (("a", 0, 5.0), ("b", 5, 50.0), ("c", 6, 500.0), ("d", 9, 5000.0), ("e", 9, 1.0)):
        wait(redis, "m", priority, age_s, name)
    redis.hset(keys.job_key("r"), mapping={"queue": queue_name("m"), "priority": 9})
    redis.zadd(keys.running_key(), {"r": 1.0})
    scrape = Scrape(redis)
    for name, waiting, oldest_s in (("interactive", 2, 50), ("bulk", 3, 5000)):
        labels = {"model": "m", "class": name}
        assert value(scrape, "cellama_jobs_waiting", **labels) == waiting
        assert value(scrape, "cellama_oldest_waiting_seconds", **labels) == pytest.approx(oldest_s, abs=30)
    assert value(scrape, "celery_queue_length", queue="cellama:queue:m") == 5
    assert value(scrape, "cellama_jobs_running", **{"model": "m", "class": "bulk"}) == 1
    assert value(scrape, "cellama_jobs_running", **{"model": "m", "class": "interactive"}) == 0
    assert value(scrape, "cellama_queue_workers", model="m") == 0
    assert value(scrape, "cellama_up") == 1


def test_scrape_combines_the_tenants_beyond_the_limit(redis: Any) -> None:
    service = ServiceWriter(redis)
    for number in range(module.MAX_SHARES + 2):
        service.note(f"t{number}", 100.0 - number)
    service.flush()
    redis.hset(keys.job_key("r"), mapping={"queue": queue_name("m"), "priority": 9, "fairness_key": "t0"})
    redis.zadd(keys.running_key(), {"r": 1.0})
    scrape = Scrape(redis)
    assert value(scrape, "cellama_tenant_service_tokens", tenant="t0") == 100
    assert value(scrape, "cellama_tenant_running_jobs", tenant="t0") == 1
    assert value(scrape, "cellama_tenant_waiting_jobs", tenant="t0") == 0
    assert value(scrape, "cellama_tenant_service_tokens", tenant="other") == 80 + 79
    assert value(scrape, "cellama_scrape_truncated") == 1


def test_scrape_of_an_empty_redis_contains_metrics_but_no_workers(redis: Any) -> None:
    scrape = Scrape(redis)
    assert value(scrape, "cellama_workers") == 0
    assert value(scrape, "cellama_jobs_waiting", model=":default") == 0
    assert value(scrape, "cellama_worker_age_seconds") is None
    assert value(scrape, "cellama_dead_jobs") == 0


def test_scrape_counts_workers_only_when_their_model_is_ready(redis: Any) -> None:
    entry = worker_entry("w", READY, {**READY, "id": "other", "status": "loading"}, seen_at=redis_time(redis))
    redis.hset(keys.workers_key(), "w", json.dumps(asdict(replace(entry, started_at=1.0))))
    scrape = Scrape(redis)
    assert value(scrape, "cellama_workers") == 1
    assert value(scrape, "cellama_queue_workers", model="m") == 1


def test_scrape_has_an_estimate_for_each_class(redis: Any) -> None:
    entry = worker_entry("w", READY, seen_at=redis_time(redis))
    redis.hset(keys.workers_key(), "w", json.dumps(asdict(entry)))
    for number in range(2 * TEXT_SLOTS):
        wait(redis, "m", 9, 5.0, f"job {number}")
    scrape = Scrape(redis)
    eta_s = {name: value(scrape, "cellama_queue_eta_seconds", **{"model": "m", "class": name}) for name in CLASSES}
    assert eta_s["interactive"] == 0.0
    assert (eta_s["bulk"] or 0.0) > 0.0


def test_scrape_omits_queues_beyond_the_limit_and_is_marked_as_truncated(
    redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_QUEUES", 3)
    for number in range(5):
        wait(redis, f"m{number}", 3, 1.0, f"job{number}")
    scrape = Scrape(redis)
    assert value(scrape, "cellama_scrape_truncated") == 1
    assert value(scrape, "cellama_jobs_waiting", model="m1") is not None
    assert value(scrape, "cellama_jobs_waiting", model="m4") is None
    entry = worker_entry("w", {**READY, "id": "m4"}, seen_at=redis_time(redis))
    redis.hset(keys.workers_key(), "w", json.dumps(asdict(entry)))
    assert (
        value(Scrape(redis), "cellama_jobs_waiting", model="m4") is not None
    )  # queues that a worker serves come first


def test_scrape_measures_the_ledger_with_the_redis_clock(redis: Any) -> None:
    now = redis_time(redis)
    redis.zadd(keys.leases_key(), {"a": now - 10, "b": now + 1000})
    redis.zadd(keys.due_key(), {"c": now - 100, "d": now + 1000})
    redis.zadd(keys.dead_key(), {"e": 1.0})
    redis.zadd(keys.missing_key(), {"f": 1.0, "g": 1.0})
    scrape = Scrape(redis)
    figures = {"leases": 2, "leases_overdue": 1, "due": 1, "missing": 2}
    assert {name: value(scrape, f"cellama_ledger_{name}") for name in figures} == figures
    assert value(scrape, "cellama_ledger_due_seconds") == pytest.approx(100, abs=30)
    assert value(scrape, "cellama_ledger_leases_overdue_seconds") == pytest.approx(10, abs=5)
    assert value(scrape, "cellama_dead_jobs") == 1


def test_scrape_counts_bulk_runs_by_state_and_lines_of_active_runs(redis: Any) -> None:
    Batches(redis).write("r", state="in_progress", total=10, finished=4, failed=1)
    Batches(redis).write("s", state="completed", total=7, finished=7, failed=0)
    Batches(redis).write("t", state="of a later version")
    scrape = Scrape(redis)
    states = {"in_progress": 1, "completed": 1, "other": 1, "failed": 0}
    assert {state: value(scrape, "cellama_bulk_runs", state=state) for state in states} == states
    lines = {"done": 4, "failed": 1, "left": 5}
    assert {state: value(scrape, "cellama_bulk_lines", state=state) for state in lines} == lines


def test_scrape_combines_the_keys_of_a_tenant(redis: Any) -> None:
    for tokens in (5, 7):
        key = new_key()
        entry = KeyEntry(id=key.id, digest=key.digest, tenant="acme")
        redis.hset(keys.api_keys_key(), entry.id, entry.model_dump_json(exclude_none=True))
        redis.hset(keys.key_charges_key(entry.id), "tokens", tokens)
        redis.zadd(keys.key_jobs_key(entry.id), {"lease": redis_time(redis) + 1000, "old": 1.0})
    redis.hset(keys.api_keys_key(), "broken", b"\xff{")
    scrape = Scrape(redis)
    assert value(scrape, "cellama_tenant_window_tokens", tenant="acme") == 12
    assert value(scrape, "cellama_tenant_jobs", tenant="acme") == 2
    assert value(scrape, "cellama_scrape_truncated") == 0


@pytest.mark.parametrize("name", ["MAX_RUNS", "MAX_KEYS", "MAX_RUNNING"])
def test_scrape_is_marked_as_truncated_when_a_limit_is_exceeded(
    redis: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(module, name, 2)
    for number in range(3):
        Batches(redis).write(f"r{number}", state="in_progress")
        redis.zadd(keys.running_key(), {f"job{number}": 1.0})
        key = new_key()
        entry = KeyEntry(id=key.id, digest=key.digest, tenant="acme")
        redis.hset(keys.api_keys_key(), entry.id, entry.model_dump_json(exclude_none=True))
    assert value(Scrape(redis), "cellama_scrape_truncated") == 1


def test_scrape_is_not_truncated_when_only_finished_runs_are_omitted(
    redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RUNS", 2)
    for number in range(3):
        Batches(redis).write(f"r{number}", state="completed")
    scrape = Scrape(redis)
    assert value(scrape, "cellama_bulk_runs", state="completed") == 2
    assert value(scrape, "cellama_scrape_truncated") == 0


def test_scrape_reports_cellama_up_as_0_until_redis_answers(redis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    scrape = Scrape(redis, lambda: now[0])

    def away() -> Any:
        raise RedisConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(redis, "time", away)
        assert value(scrape, "cellama_up") == 0
        assert value(scrape, "cellama_workers") is None
    assert value(scrape, "cellama_up") == 0  # metrics are cached for one second
    now[0] += 2
    assert value(scrape, "cellama_up") == 1

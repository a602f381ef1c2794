"""Workers take jobs whose prefix they hold: the real scripts on a real Redis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.bench.harness.service import wait_until
from cellama.tasks.contract import events
from cellama.tasks.contract.keys import context_key
from cellama.tasks.contract.names import PRIORITY_INTERACTIVE, queue_key
from cellama.tasks.contract.shapes.results import usage_of
from cellama.tasks.state.ledger import Entry, JobsLeft, Ledger, WorkerCache, new_run

from ..conftest import empty_database
from .ledgers import LEASE_S, submission

SLOW, FAST = 1.0, 1e9  # bytes per second that a worker prefills


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[Redis]:
    with empty_database(redis_server, 9) as url, Redis.from_url(url) as redis:
        yield redis


class NearFleet:
    """Workers with caches that take jobs of one list."""

    def __init__(self, redis: Redis, queue: str) -> None:
        self.redis = redis
        self.ledger = Ledger(redis)
        self.queue = queue
        self.key = queue_key(queue, PRIORITY_INTERACTIVE)

    def submit(self, job_id: str, text: str, length: int = 2000, **parameters: Any) -> None:
        """Submit a job whose prompt repeats this text."""
        prompt = (text * length)[:length]
        assert self.ledger.submit([submission(self.queue, job_id, prompt=prompt, **parameters)]) == [1]

    def take(
        self, worker: str | None, *, size: float = 1e6, bytes_per_s: float | None = None, page: int = 0
    ) -> list[str]:
        """Let a worker take the next job and a page, and return their ids. None is a worker without affinity.

        By default, the worker called "one" is fast, and leaves no jobs to others. The others are slow.
        """
        default = FAST if worker == "one" else SLOW
        cache = None if worker is None else WorkerCache(worker, size, bytes_per_s or default)
        ticket: Any = self.redis.rpop(self.key)
        limits = [(page, [self.key])] if page else []
        found = self.ledger.take(self.key, json.loads(ticket)["headers"]["id"], LEASE_S, limits, cache=cache)
        return [fetched.taken.job_id for fetched in found]

    def end(self, job_id: str, worker: str, key: str) -> None:
        """End a job on a worker, with the key of its context."""
        attempt = self.ledger.begin(job_id, new_run(), worker)
        ended = events.numbered(events.done("stop", usage_of()), 0)
        self.ledger.write([Entry(job_id=job_id, run=attempt.run, event=ended, contexts=((context_key(key), b"x"),))])


@pytest.fixture
def fleet(redis: Redis, queue: str) -> NearFleet:
    return NearFleet(redis, queue)


def test_worker_takes_the_job_whose_prefix_it_holds(fleet: NearFleet) -> None:
    fleet.submit("a1", "a")
    assert fleet.take("one") == ["a1"]
    for job_id in ("b1", "c1", "a2"):
        fleet.submit(job_id, job_id[0])
    assert fleet.take("one") == ["a2"]
    assert fleet.take("one") == ["b1"]


def test_job_is_left_to_the_worker_that_holds_its_prefix(fleet: NearFleet) -> None:
    fleet.submit("a1", "a")
    assert fleet.take("one") == ["a1"]
    fleet.submit("a2", "a")
    with pytest.raises(JobsLeft) as left:
        fleet.take("two")
    assert 0 < left.value.wait_s <= 1
    assert fleet.redis.llen(fleet.key) == 1
    assert fleet.take("one") == ["a2"]


def test_worker_takes_another_job_when_it_leaves_a_job_to_the_prefix_holder(fleet: NearFleet) -> None:
    fleet.submit("a1", "a")
    assert fleet.take("one") == ["a1"]
    fleet.submit("a2", "a")
    fleet.submit("b1", "b")
    assert fleet.take("two") == ["b1"]
    assert fleet.take("one") == ["a2"]


def test_job_is_taken_when_the_holder_of_its_prefix_has_been_busy_for_too_long(fleet: NearFleet) -> None:
    fleet.submit("a1", "a")
    assert fleet.take("one") == ["a1"]
    fleet.submit("a2", "a")

    def taken() -> list[str]:
        try:
            return fleet.take("two", bytes_per_s=10_000)  # about 0.2 s for 2,000 bytes
        except JobsLeft:
            return []

    assert taken() == []
    assert wait_until(taken, "the job that was left") == ["a2"]


def test_busy_worker_leaves_a_job_to_an_idle_worker(fleet: NearFleet) -> None:
    for job_id, worker in (("a1", "one"), ("b1", "two"), ("c1", "two")):
        fleet.submit(job_id, job_id[0])
        assert fleet.take(worker, bytes_per_s=FAST if worker == "one" else 100) == [job_id]
    fleet.submit("b2", "b")
    with pytest.raises(JobsLeft):  # it prefills b1 and c1 for 40 s, and the other worker needs 20 s for b2
        fleet.take("two", bytes_per_s=100)
    assert fleet.take("one") == ["b2"]


def test_busy_worker_takes_a_job_whose_prefix_no_worker_holds(fleet: NearFleet) -> None:
    for job_id, worker in (("a1", "one"), ("b1", "two"), ("c1", "two")):
        fleet.submit(job_id, job_id[0])
        assert fleet.take(worker) == [job_id]


def test_first_job_is_passed_over_for_a_limited_time(fleet: NearFleet) -> None:
    fleet.submit("a1", "a")
    assert fleet.take("one") == ["a1"]
    fleet.submit("b1", "b")
    fleet.submit("a2", "a")
    fleet.submit("a3", "a")
    assert fleet.take("one") == ["a2"]
    assert fleet.take("one", bytes_per_s=1e9) == ["b1"]


def test_job_is_taken_immediately_when_the_holder_of_its_prefix_has_left(fleet: NearFleet) -> None:
    fleet.submit("a1", "a")
    assert fleet.take("one") == ["a1"]
    fleet.submit("a2", "a")
    fleet.ledger.forget_cache("one")  # as when it stops, or dies and its record expires
    assert fleet.take("two") == ["a2"]


def test_worker_record_expires_unless_the_worker_renews_it(fleet: NearFleet) -> None:
    fleet.submit("a1", "a")
    assert fleet.take("one") == ["a1"]
    (key,) = fleet.redis.keys("*:prefixes:one")
    assert 0 < fleet.redis.ttl(key) <= 20  # type: ignore[operator]
    fleet.redis.expire(key, 1000)
    fleet.ledger.keep_cache("one")
    assert fleet.redis.ttl(key) <= 20  # type: ignore[operator]


def test_prefixes_in_other_scopes_are_ignored(fleet: NearFleet) -> None:
    fleet.submit("a1", "a", cache_scope="acme", fairness_key="")
    assert fleet.take("one") == ["a1"]
    fleet.submit("a2", "a", cache_scope="other", fairness_key="")
    fleet.submit("a3", "a", cache_scope="acme", fairness_key="")
    assert fleet.take("one") == ["a3"]
    assert fleet.take("two") == ["a2"]


def test_worker_forgets_prefixes_that_no_longer_fit_into_its_cache(fleet: NearFleet) -> None:
    for number, text in enumerate("abc"):
        fleet.submit(f"{text}{number}", text)
        assert fleet.take("one", size=4000) == [f"{text}{number}"]
    fleet.submit("a", "a")
    fleet.submit("c", "c")
    assert fleet.take("two") == ["a"]
    with pytest.raises(JobsLeft):
        fleet.take("two")


def test_fairness_key_with_the_least_service_is_served_first(fleet: NearFleet) -> None:
    for job_id, key in (("a1", "large"), ("a2", "large"), ("b1", "small")):
        fleet.submit(job_id, job_id[0], fairness_key=key)
    assert [fleet.take("one") for _ in range(3)] == [["a1"], ["b1"], ["a2"]]


def test_jobs_without_prefix_hashes_are_taken_in_order(fleet: NearFleet) -> None:
    for number in range(5):
        fleet.submit(f"job{number}", "x", length=100)
    assert fleet.take("one", page=8) == ["job0", "job1"]  # a page is at most an eighth of a list
    assert fleet.take("two") == ["job2"]
    assert not fleet.redis.exists("cellama:holders")


def test_worker_without_affinity_takes_jobs_in_order(fleet: NearFleet) -> None:
    fleet.submit("a1", "a")
    assert fleet.take("one") == ["a1"]
    fleet.submit("a2", "a")
    fleet.submit("b1", "b")
    assert fleet.take(None) == ["a2"]


def test_page_of_jobs_excludes_jobs_left_to_other_workers(fleet: NearFleet) -> None:
    fleet.submit("a1", "a")
    assert fleet.take("one") == ["a1"]
    for number in range(2, 18):
        fleet.submit(f"a{number}", "a")
    fleet.submit("b1", "b")
    assert fleet.take("one", page=8) == ["a2", "a3", "a4"]
    assert fleet.take("two", page=8) == ["b1"]
    with pytest.raises(JobsLeft):
        fleet.take("two", page=8)
    assert fleet.redis.llen(fleet.key) == 13


def test_chat_with_a_parent_key_is_taken_by_the_worker_that_holds_its_context(fleet: NearFleet) -> None:
    key = "0123456789abcdef" * 4
    fleet.submit("a1", "a")
    assert fleet.take("one") == ["a1"]
    fleet.end("a1", "one", key)
    fleet.submit("b1", "b")
    fleet.submit("next", "x", length=10, parent_key=key)
    assert fleet.take("two") == ["b1"]
    with pytest.raises(JobsLeft):
        fleet.take("two")
    assert fleet.take("one") == ["next"]


def test_affinity_setting_disables_prefix_hashes(fleet: NearFleet, settings_environment: Any) -> None:
    settings_environment(affinity="false")
    fleet.submit("a1", "a")
    assert not fleet.redis.hexists("cellama:job:a1", "prefixes")

"""Fair shares between tenants on a real Redis: the real scripts choose, and the time is virtual."""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import mean
from typing import Any

import pytest
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.fairness import check_fairness_key, fairness_key_of
from cellama.tasks.contract.keys import backlog_key, shares_key, terms_key
from cellama.tasks.contract.names import PRIORITY_INTERACTIVE, queue_key
from cellama.tasks.contract.shapes.results import usage_of
from cellama.tasks.state.ledger import Fetched, Ledger

from ..conftest import empty_database
from .ledgers import LEASE_S, STARTED, begin, num_ahead, submission, write


class Fleet:
    """Workers that take jobs of one list. Each job costs as many generated tokens as the test says."""

    def __init__(self, redis: Redis, ledger: Ledger, queue: str) -> None:
        self.redis = redis
        self.ledger = ledger
        self.queue = queue
        self.key = queue_key(queue, PRIORITY_INTERACTIVE)
        self.keys: dict[str, str] = {}  # fairness keys by job
        self.service: Counter[str] = Counter()  # tokens of ended jobs by fairness key

    def submit(self, key: str, count: int = 1, max_tokens: int = 100) -> None:
        jobs = [submission(self.queue, fairness_key=key, max_tokens=max_tokens) for _ in range(count)]
        self.keys |= dict.fromkeys((job.job_id for job in jobs), key)
        for start in range(0, count, 100):
            self.ledger.submit(jobs[start : start + 100])

    def take(self) -> Fetched:
        ticket: Any = self.redis.rpop(self.key)
        (fetched,) = self.ledger.take(self.key, json.loads(ticket)["headers"]["id"], LEASE_S)
        return fetched

    def key_of(self, fetched: Fetched) -> str:
        return self.keys[fetched.taken.job_id]

    def end(self, fetched: Fetched, tokens: int, **usage: int) -> None:
        taken = fetched.taken
        attempt = begin(self.ledger, taken.job_id, token=taken.token)
        counted = {**usage_of(completion_tokens=tokens), **usage}
        write(self.ledger, attempt, STARTED, events.done("stop", counted))  # type: ignore[arg-type]
        self.ledger.release(taken)
        self.service[self.key_of(fetched)] += tokens

    def served(self, count: int, tokens: int = 100) -> list[str]:
        """Run the next jobs one after another, and return their keys."""
        keys = []
        for _ in range(count):
            fetched = self.take()
            keys.append(self.key_of(fetched))
            self.end(fetched, tokens)
        return keys

    def run(
        self, num_workers: int, until: float, tokens_of: Callable[[str], int], check: Callable[[], None] = lambda: None
    ) -> None:
        """Run workers in virtual time. A job takes as many seconds as it generates tokens."""
        running: list[tuple[float, int, Fetched, int]] = []
        now, number = 0.0, 0
        while now < until:
            while len(running) < num_workers:
                fetched = self.take()
                tokens = tokens_of(self.key_of(fetched))
                heapq.heappush(running, (now + tokens, number, fetched, tokens))
                number += 1
            now, _, fetched, tokens = heapq.heappop(running)
            self.end(fetched, tokens)
            check()


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[Redis]:
    with empty_database(redis_server, 9) as url, Redis.from_url(url) as redis:
        yield redis


@pytest.fixture
def fleet(redis: Redis, queue: str) -> Fleet:
    return Fleet(redis, Ledger(redis), queue)


def jain(values: Iterable[float]) -> float:
    """Return Jain's index, which is 1 if all values are equal."""
    values = list(values)
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def test_small_tenant_gets_half_of_the_service_when_a_large_tenant_has_100_times_as_many_jobs(fleet: Fleet) -> None:
    fleet.submit("large", 300)
    fleet.submit("small", 3)
    assert Counter(fleet.served(6)) == {"large": 3, "small": 3}
    assert fleet.served(3) == ["large"] * 3  # nobody waits for the small tenant


def test_jobs_with_the_same_fairness_key_are_served_in_order(fleet: Fleet) -> None:
    fleet.submit("", 20)
    jobs = list(fleet.keys)
    assert [fleet.take().taken.job_id for _ in jobs] == jobs
    assert not fleet.redis.exists(backlog_key(fleet.key), shares_key(fleet.key) + "\0")


def test_share_is_computed_from_the_tokens_of_ended_jobs(fleet: Fleet) -> None:
    fleet.submit("long", 50)
    fleet.submit("short", 150)
    fleet.run(1, 4000, lambda key: 90 if key == "long" else 30)
    assert jain(fleet.service.values()) > 0.99


def test_cached_prompt_tokens_are_free(fleet: Fleet) -> None:
    fleet.submit("cached", 10)
    fleet.submit("computed", 10)
    for _ in range(8):
        fetched = fleet.take()
        cached = 1000 if fleet.key_of(fetched) == "cached" else 0
        fleet.end(fetched, 10, prompt_tokens=1000, cached_tokens=cached)
    assert fleet.service["cached"] > fleet.service["computed"]


@pytest.mark.parametrize("source", ["setting", "Redis"])
def test_service_is_divided_according_to_weights(
    redis: Redis, queue: str, settings_environment: Callable[..., None], source: str
) -> None:
    weights: Mapping[str, float] = {"a": 3, "": 2}
    if source == "setting":
        settings_environment(fairness_weights=json.dumps(weights))
    else:
        redis.hset(terms_key(), mapping=dict(weights))
    fleet = Fleet(redis, Ledger(redis), queue)
    for key in ("a", "b", ""):
        fleet.submit(key, 70)
    assert Counter(fleet.served(60)) == {"a": 30, "b": 10, "": 20}


def test_many_keys_below_one_parent_gain_no_advantage(fleet: Fleet) -> None:
    for number in range(500):
        fleet.submit(f"crowd/{number}", 1)
    fleet.submit("alone", 300)
    served = Counter(key.partition("/")[0] for key in fleet.served(400))
    assert served["crowd"] <= 1.02 * 200


def test_teams_divide_the_share_of_their_organization(fleet: Fleet) -> None:
    for key in ("org/a", "org/b", "org", "other"):
        fleet.submit(key, 40)
    assert Counter(fleet.served(60)) == {"org/a": 10, "org/b": 10, "org": 10, "other": 30}


def test_returning_tenant_is_not_compensated_for_its_absence(fleet: Fleet) -> None:
    fleet.submit("away", 1)
    fleet.submit("busy", 100)
    fleet.served(40)
    fleet.submit("away", 40)
    assert Counter(fleet.served(20))["away"] in (10, 11)


def test_tenant_that_leaves_and_returns_keeps_its_service(fleet: Fleet) -> None:
    """A tenant that queues one job at a time gets no more than its share."""
    fleet.submit("steady", 100)
    keys = []
    for _ in range(40):
        if "leaving" not in {fleet.keys[job_id] for job_id in waiting_jobs(fleet)}:
            fleet.submit("leaving", 1)
        keys += fleet.served(1)
    assert Counter(keys)["leaving"] in (20, 21)


def waiting_jobs(fleet: Fleet) -> list[str]:
    members: Any = fleet.redis.zrange(backlog_key(fleet.key), 0, -1)
    return [member.decode().partition("\0")[2][17:] for member in members]


def test_job_that_is_handed_back_is_next_again(fleet: Fleet) -> None:
    fleet.submit("a", 2)
    fleet.submit("b", 2)
    first = fleet.take()
    fleet.take()
    fleet.ledger.requeue(first.taken)
    assert fleet.take().taken.job_id == first.taken.job_id


@pytest.mark.parametrize("seed", range(8))
def test_service_difference_between_backlogged_tenants_stays_bounded(fleet: Fleet, seed: int) -> None:
    """VTC's bound: the jobs that run at the same time, each with the largest cost, and one more."""
    source = random.Random(seed)
    num_workers, names = source.choice((1, 3)), [f"t{number}" for number in range(source.choice((2, 4)))]
    largest = {name: source.choice((10, 100)) for name in names}
    for name in names:
        fleet.submit(name, 6000 // largest[name], max_tokens=largest[name])
    differences = []

    def check() -> None:
        services = [fleet.service[name] for name in names]
        differences.append(max(services) - min(services))

    fleet.run(num_workers, 800, lambda key: source.randint(1, largest[key]), check)
    assert {fleet.keys[job_id] for job_id in waiting_jobs(fleet)} == set(names), "all tenants are still backlogged"
    assert max(differences) <= 2 * (num_workers + 1) * 100


def test_queue_position_is_exact_with_one_key(fleet: Fleet) -> None:
    fleet.submit("", 30)
    jobs = list(fleet.keys)
    assert [num_ahead(fleet.ledger, job_id) for job_id in jobs] == list(range(30))
    held = [fleet.take() for _ in range(3)]
    assert [num_ahead(fleet.ledger, job_id) for job_id in jobs] == list(range(30))
    fleet.end(held[0], 10)
    assert [num_ahead(fleet.ledger, job_id) for job_id in jobs] == [None, *range(29)]


def test_queue_position_of_a_small_tenant_does_not_count_all_jobs_of_a_large_tenant(fleet: Fleet) -> None:
    fleet.submit("large", 500)
    fleet.submit("small", 3)
    small = list(fleet.keys)[-3:]
    ahead = fleet.ledger.ahead(small[2])
    assert ahead is not None
    assert [(fleet.keys[job_id], count) for job_id, count in ahead.of_keys] == [("small", 2), ("large", 3)]
    assert [num_ahead(fleet.ledger, job_id) for job_id in small] == [1, 3, 5]
    assert fleet.served(6) == ["large", "small"] * 3


@pytest.mark.parametrize("seed", range(6))
def test_estimated_position_with_several_keys_is_close_to_the_actual_position(fleet: Fleet, seed: int) -> None:
    """Jobs of a key cost as much as its earlier jobs on average, but vary by half."""
    source = random.Random(seed)
    names = ["a", "b/x", "b/y", "b", "", *(f"many/{number}" for number in range(source.choice((2, 30))))]
    fleet.redis.hset(terms_key(), mapping={"a": 3, "b": 2, "b/x": 2})
    means = {name: source.choice((0.2, 1.0)) for name in names}  # part of the requested tokens
    requested: dict[str, int] = {}
    for _ in range(20):
        for name in source.sample(names, min(5, len(names))):
            num_tokens, before = source.choice((100, 200)), set(fleet.keys)
            fleet.submit(name, source.choice((1, 5)), max_tokens=num_tokens)
            requested |= dict.fromkeys(fleet.keys.keys() - before, num_tokens)

    def serve() -> str:
        fetched = fleet.take()
        tokens = means[fleet.key_of(fetched)] * requested[fetched.taken.job_id] * source.uniform(0.5, 1.5)
        fleet.end(fetched, round(tokens))
        return fetched.taken.job_id

    while set(fleet.keys.values()) - set(fleet.service):
        serve()  # until the cost of each key is known
    waiting = waiting_jobs(fleet)
    estimates = {job_id: num_ahead(fleet.ledger, job_id) for job_id in waiting}
    by_age = {job_id: rank for rank, job_id in enumerate(sorted(waiting, key=list(fleet.keys).index))}
    errors, errors_by_age = [], []
    for real in range(len(waiting)):
        job_id = serve()
        estimate = estimates[job_id]
        assert estimate is not None
        errors.append(abs(estimate - real) / len(waiting))
        errors_by_age.append(abs(by_age[job_id] - real) / len(waiting))
    assert mean(errors) < 0.08
    assert max(errors) < 0.3
    assert mean(errors_by_age) > 2 * mean(errors), "counting all earlier jobs would be as good"


@pytest.mark.parametrize("key", ["/", "a//b", "a/", "x" * 65, "a\0b", 1])
def test_invalid_fairness_key_is_rejected(key: object) -> None:
    with pytest.raises(InvalidJob, match="fairness_key"):
        check_fairness_key(key)
    if isinstance(key, str):
        assert check_fairness_key(fairness_key_of(key)) != key

"""Concurrency limits of tenants and models, on a real Redis and with real workers."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import LimitReached, app, generate
from cellama.tasks.contract.fairness import limit_name
from cellama.tasks.contract.keys import job_key, leases_key, limited_key, slots_key
from cellama.tasks.contract.kinds.chunk import TASK_CHUNK
from cellama.tasks.contract.names import PRIORITY_BULK, PRIORITY_INTERACTIVE, model_of, queue_key, queue_name
from cellama.tasks.state.fair_shares import num_held, set_limit
from cellama.tasks.state.ledger import Fetched, Ledger, Taken
from cellama.tasks.state.scripts import run_script
from cellama.tasks.state.tenants import queue_shares

from ..conftest import PATIENCE_S, WorkerProcess, empty_database, wait_until
from .conftest import GREEDY, StartWorker
from .ledgers import LEASE_S, submission

Limit = Callable[..., "LimitedFleet"]


class LimitedFleet:
    """Workers with free capacity, which take jobs of one queue until no job can be taken."""

    def __init__(self, redis: Redis, queue: str) -> None:
        self.redis = redis
        self.ledger = Ledger(redis)
        self.queue = queue
        self.keys: dict[str, str] = {}  # fairness keys by job
        self.held: list[Fetched] = []

    def submit(self, key: str, count: int = 1, priority: int = PRIORITY_INTERACTIVE) -> None:
        jobs = [submission(self.queue, fairness_key=key, priority=priority) for _ in range(count)]
        self.keys |= dict.fromkeys((job.job_id for job in jobs), key)
        self.ledger.submit(jobs)

    def fill(self) -> Counter[str]:
        """Take jobs with all tickets, and return how many jobs of each key the workers hold."""
        for priority in (PRIORITY_INTERACTIVE, PRIORITY_BULK):
            key = queue_key(self.queue, priority)
            while ticket := self.redis.rpop(key):
                self.held += self.ledger.take(key, json.loads(ticket)["headers"]["id"], LEASE_S)  # type: ignore[arg-type]
        return Counter(self.keys[fetched.taken.job_id] for fetched in self.held)

    def leave(self, key: str, leave: Callable[[Taken], None]) -> None:
        """Let the workers lose one job of a key."""
        fetched = next(each for each in self.held if self.keys[each.taken.job_id] == key)
        self.held.remove(fetched)
        leave(fetched.taken)


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[Redis]:
    with empty_database(redis_server, 10) as url, Redis.from_url(url) as redis:
        yield redis


@pytest.fixture
def limit(redis: Redis, queue: str, settings_environment: Callable[..., None]) -> Limit:
    """Return a function that returns a fleet with these limits of fairness keys and of the model of the queue."""

    def fleet(limits: dict[str, int], of_model: int | None = None) -> LimitedFleet:
        settings_environment(
            fairness_limits=json.dumps(limits), model_limits=json.dumps({model_of(queue): of_model} if of_model else {})
        )
        return LimitedFleet(redis, queue)

    return fleet


def test_jobs_above_the_limit_wait_while_other_jobs_are_served(limit: Limit) -> None:
    fleet = limit({"a": 2})
    fleet.submit("a", 20)
    fleet.submit("b", 20)
    assert fleet.fill() == {"a": 2, "b": 20}
    fleet.submit("b", 5)
    assert fleet.fill() == {"a": 2, "b": 25}


@pytest.mark.parametrize("leave", ["release", "requeue", "set_aside", "restore"])
def test_released_or_requeued_job_makes_room_for_the_next_job(limit: Limit, leave: str) -> None:
    fleet = limit({"a": 2})
    fleet.submit("a", 5)
    fleet.submit("b", 1)
    ways: dict[str, Callable[[Taken], Any]] = {
        "release": fleet.ledger.release,
        "requeue": fleet.ledger.requeue,
        "set_aside": lambda taken: fleet.ledger.set_aside(taken, 60),
        "restore": lambda taken: expire(fleet, taken),
    }
    assert fleet.fill()["a"] == 2
    for _ in range(3):
        fleet.leave("a", ways[leave])
        assert fleet.fill() == {"a": 2, "b": 1}


def expire(fleet: LimitedFleet, taken: Taken) -> None:
    fleet.ledger.restore(LEASE_S)  # this call may only extend the leases
    fleet.redis.zadd(leases_key(), {taken.job_id: 1})
    fleet.ledger.restore(LEASE_S)


def test_each_level_of_a_key_has_its_own_limit(limit: Limit) -> None:
    fleet = limit({"org": 4, "org/a": 1})
    for key in ("org/a", "org/b", "org", "other"):
        fleet.submit(key, 6)
    held = fleet.fill()
    assert held["other"] == 6
    assert held["org/a"] == 1
    assert held["org/a"] + held["org/b"] + held["org"] == 4
    fleet.leave("org/b", fleet.ledger.release)
    fleet.submit("org/b", 6)
    after = fleet.fill()
    assert (after["org/a"], after["org/a"] + after["org/b"] + after["org"]) == (1, 4)


def test_new_team_is_served_while_the_other_teams_are_at_their_limit(limit: Limit) -> None:
    fleet = limit({"org/a": 1})
    fleet.submit("org/a", 3)
    assert fleet.fill() == {"org/a": 1}
    fleet.submit("org/b", 2)
    fleet.submit("org", 2)
    assert fleet.fill() == {"org/a": 1, "org/b": 2, "org": 2}


def test_model_limit_counts_jobs_with_all_priorities(limit: Limit) -> None:
    fleet = limit({}, of_model=3)
    fleet.submit("a", 5, PRIORITY_BULK)
    assert fleet.fill() == {"a": 3}
    fleet.submit("b", 5)
    assert fleet.fill() == {"a": 3}
    fleet.leave("a", fleet.ledger.release)
    assert fleet.fill() == {"a": 2, "b": 1}, "the more urgent job is the next one"


def test_limit_that_is_set_later_counts_running_jobs(redis: Redis, queue: str) -> None:
    fleet = LimitedFleet(redis, queue)
    fleet.submit("a", 3)
    assert fleet.fill() == {"a": 3}
    set_limit(redis, "a", 2)
    fleet.submit("a", 5)
    assert fleet.fill() == {"a": 3}
    fleet.leave("a", fleet.ledger.release)
    assert fleet.fill() == {"a": 2}
    set_limit(redis, "a", 5)
    assert fleet.fill() == {"a": 5}
    set_limit(redis, "a", None)
    assert fleet.fill() == {"a": 7}
    assert num_held(redis, "a") == 5, "jobs without a limit need no slots"


def test_slot_is_freed_when_the_entry_of_its_job_is_lost(limit: Limit) -> None:
    fleet = limit({"a": 1})
    fleet.submit("a", 2)
    assert fleet.fill() == {"a": 1}
    lost = fleet.held.pop().taken
    fleet.redis.delete(job_key(lost.job_id))
    expire(fleet, lost)
    assert run_script(fleet.redis, "check_slots", [], []) == 1
    assert fleet.fill() == {"a": 1}
    assert fleet.redis.smembers(limited_key()) == {b"a"}


def test_blocked_tenants_do_not_slow_down_take_calls(limit: Limit) -> None:
    names = [f"t{number}" for number in range(300)]
    fleet = limit(dict.fromkeys(names, 1))
    for name in names:
        fleet.submit(name, 2)
    fleet.submit("free", 10)
    fleet.fill()
    assert len(queue_shares(fleet.redis)) == len(names), "all tenants wait at their limits"
    fleet.submit("free", 1)
    before = num_commands(fleet.redis)
    assert fleet.fill()["free"] == 11
    assert num_commands(fleet.redis) - before < 40


def test_take_drops_only_a_few_tickets_of_jobs_above_a_limit(limit: Limit) -> None:
    fleet = limit({"a": 1})
    fleet.submit("a", 2000)
    key = queue_key(fleet.queue, PRIORITY_INTERACTIVE)
    tickets: Any = [json.loads(message)["headers"]["id"] for message in fleet.redis.rpop(key, 2)]  # type: ignore[union-attr]
    assert len(fleet.ledger.take(key, tickets[0], LEASE_S)) == 1
    before = num_commands(fleet.redis)
    assert fleet.ledger.take(key, tickets[1], LEASE_S, [(8, [key])]) == []
    assert num_commands(fleet.redis) - before < 1000
    assert fleet.redis.llen(key) == 1998 - 100


def num_commands(redis: Redis) -> int:
    stats: Any = redis.info("commandstats")
    return sum(stat["calls"] for name, stat in stats.items() if name != "cmdstat_info")


def test_call_above_the_limit_is_rejected(
    settings_environment: Callable[..., None], redis_server: RedisServer, unserved: str, redis_client: Redis
) -> None:
    limits = {"fairness_limits": json.dumps({unserved: 2}), "model_limits": json.dumps({unserved: 3})}
    settings_environment(redis_url=redis_server.url, over_limit="reject", **limits)
    for key in (unserved, f"{unserved}/team"):
        generate.apply_async((unserved, "Hi"), fairness_key=key)
    with pytest.raises(
        LimitReached, match=f"fairness_limits: .*'{unserved}' would have 3 waiting or running jobs.* limit is 2; retry"
    ):
        generate.apply_async((unserved, "Hi"), fairness_key=unserved)
    many = generate.check_many([((unserved, "Hi"), {})] * 2)
    with pytest.raises(
        LimitReached, match=f"model_limits: .*'{unserved}' would have 4 waiting or running jobs.* limit is 3"
    ):
        generate.queue_many(many)
    assert Ledger(redis_client).num_waiting(queue_name(unserved)) == 2, "nothing was queued"
    generate.queue_many(many[:1])
    line = {"kind": "generate", "params": {"prompt": "Hi"}}
    app.tasks[TASK_CHUNK].apply_async((unserved, [line]), {"priority": PRIORITY_BULK})
    assert Ledger(redis_client).num_waiting(queue_name(unserved)) == 4, "parts of bulk runs wait"


# The number of held jobs of a tenant, according to the leases
COUNT_HELD = """
local count = 0
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if redis.call('HGET', ARGV[1] .. id, 'fairness_key') == ARGV[2] then count = count + 1 end
end
return count
"""


def test_limit_is_respected_by_two_workers_and_after_a_worker_is_killed(
    start_worker: StartWorker, redis_client: Redis, model: str
) -> None:
    """A tenant with a limit of 2 never has 3 jobs in the workers, and another tenant uses the other slots."""
    limits = json.dumps({"capped": 2})
    workers = [start_worker(slots=3, step_s=0.02, look_ahead=0, fairness_limits=limits) for _ in range(2)]
    counts, stopped = [], threading.Event()

    def sample() -> None:
        while not stopped.is_set():
            counts.append(redis_client.eval(COUNT_HELD, 1, leases_key(), job_key(""), "capped"))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, **GREEDY}
        capped = [generate.apply_async((model, "A fox"), options, fairness_key="capped") for _ in range(12)]
        for result in [generate.apply_async((model, "A dog"), options, fairness_key="free") for _ in range(4)]:
            result.get(timeout=PATIENCE_S)
        assert not all(result.ready() for result in capped), "the free tenant does not wait for the capped one"
        wait_until(
            lambda: worker_with_a_job_of(redis_client, workers, capped), "a capped job in a worker"
        ).process.kill()
        for result in capped:
            result.get(timeout=PATIENCE_S)
    finally:
        stopped.set()
        sampler.join()
    assert max(counts) == 2
    wait_until(lambda: not redis_client.exists(slots_key(limit_name("capped"))), "all slots returned")


def worker_with_a_job_of(redis: Redis, workers: list[WorkerProcess], jobs: list[Any]) -> WorkerProcess | None:
    for job in jobs:
        state, name = redis.hmget(job_key(job.id), "state", "worker")  # type: ignore[misc]
        if state == b"running":
            return next(worker for number, worker in enumerate(workers) if name.startswith(b"w%dm" % number))
    return None

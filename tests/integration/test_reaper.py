"""The reaper on a real Redis: what is lost is found once, what is only slow is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract import events
from cellama.tasks.contract.keys import (
    backlog_key,
    due_key,
    job_key,
    journal_key,
    last_restore_key,
    leases_key,
    missing_key,
    queues_key,
    reaper_key,
    running_key,
    shortages_key,
    waiting_key,
)
from cellama.tasks.contract.names import queue_key
from cellama.tasks.state.ledger import Ending, Ledger
from cellama.tasks.worker.reaper import PAGE, Reaper

from ..conftest import empty_database, wait_until
from .ledgers import begin, ids_in, num_ahead, submission, submit, take, write

LEASE_S = 60  # no lease ends, nor is a look too late, while a test runs
QUEUE = "cellama:queue:m"


class World:
    """A queue, and as many reapers as a test wants, on one Redis; time passes when the test says so."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.ledger = Ledger(redis)
        self.stored: list[tuple[str, Ending]] = []
        self.reaper = self.another_reaper()

    def another_reaper(self) -> Reaper:
        return Reaper(self.redis, self.ledger, lambda *end: self.stored.append(end), LEASE_S)

    def job(self, *, ticket: bool = True, **options: Any) -> str:
        """Submit a job. Without a ticket, Redis lost it."""
        job_id = submit(self.ledger, QUEUE, **options)
        if not ticket:
            self.redis.lpop(queue_key(QUEUE, options.get("priority", 3)))
        return job_id

    def pass_time(self, seconds: float) -> None:
        """Make earlier observations older, and let every worker check immediately."""
        for job_id in self.redis.zrange(missing_key(), 0, -1):
            self.redis.zincrby(missing_key(), -seconds, job_id)
        self.redis.delete(reaper_key("missing"))

    def look(self, times: int = 2, reaper: Reaper | None = None) -> None:
        for _ in range(times):
            (reaper or self.reaper).run_once()
            self.pass_time(LEASE_S)

    def waiting(self) -> list[str]:
        return ids_in(self.redis, QUEUE)


@pytest.fixture
def world(redis_server: RedisServer) -> Iterator[World]:
    """Use a separate database, because other tests also have lost or late jobs."""
    with empty_database(redis_server, 12) as url, Redis.from_url(url) as redis:
        yield World(redis)


@pytest.mark.parametrize("others", [0, 3])
def test_lost_ticket_is_pushed_again(world: World, others: int) -> None:
    lost = world.job(ticket=False)
    rest = [world.job() for _ in range(others)]
    world.look(times=1)
    assert world.waiting() == rest
    world.look(times=3)
    assert world.waiting() == [lost, *rest]


def test_tickets_in_use_and_tickets_of_held_jobs_do_not_count_as_lost(world: World) -> None:
    rest = [world.job() for _ in range(3)]
    take(world.ledger, world.job(ticket=False, priority=9))
    world.look(times=3)
    in_use = world.job(ticket=False, priority=9)
    world.look(times=1)
    take(world.ledger, in_use)
    world.look(times=3)
    assert world.waiting() == rest
    assert not world.redis.exists(queue_key(QUEUE, 9), shortages_key())


def test_job_missing_from_its_backlog_is_added(world: World) -> None:
    jobs = [world.job() for _ in range(3)]
    world.redis.delete(backlog_key(queue_key(QUEUE, 3)), queue_key(QUEUE, 3))
    take_of_previous = {"holder": "a worker of a version without backlogs"}
    world.redis.hset(job_key(jobs[1]), mapping=take_of_previous)
    world.look(times=3)
    assert world.waiting() == [jobs[0], jobs[2]]


def test_lost_ticket_is_pushed_alongside_jobs_that_were_handed_back(world: World) -> None:
    for back in [take(world.ledger, world.job(ticket=False)) for _ in range(2)]:
        world.ledger.requeue(back)
    world.job(ticket=False)
    world.job()
    world.look()
    assert len(world.waiting()) == 4


def test_started_job_of_a_dead_worker_is_queued_again_once(world: World) -> None:
    job_id = world.job(ticket=False)
    taken = take(world.ledger, job_id, lease_s=0)
    write(world.ledger, begin(world.ledger, job_id, token=taken.token), events.started("m", 1, "w", 1))
    world.redis.delete(last_restore_key())
    world.look(times=6)  # the first finds that nobody has looked lately, and waits another half of a lease
    assert world.waiting() == []
    world.redis.zadd(leases_key(), {job_id: 1})
    world.look(times=6)
    assert world.waiting() == [job_id]
    assert (world.ledger.state(job_id), num_ahead(world.ledger, job_id)) == ("handed_back", 0)


def test_job_with_neither_a_worker_nor_a_message_counts_as_lost(world: World) -> None:
    job_id = world.job(ticket=False)
    write(world.ledger, begin(world.ledger, job_id), events.started("m", 1, "w", 1))
    world.look()
    assert world.waiting() == [job_id]


def test_lost_job_is_found_by_any_set_of_workers(world: World) -> None:
    """A hundred workers: nobody looks twice in a row, and each lost job is found with the second look."""
    lost = [world.job(ticket=False) for _ in range(20)]
    workers = [world.another_reaper() for _ in range(100)]
    for reaper in workers[:2]:
        world.look(times=1, reaper=reaper)
    assert world.waiting() == lost
    for reaper in workers[2:]:
        world.look(times=1, reaper=reaper)
    assert world.waiting() == lost


def test_one_of_many_workers_performs_each_duty_once_per_period(world: World) -> None:
    world.job(ticket=False)
    for reaper in [world.another_reaper() for _ in range(5)]:
        reaper.run_once()
    assert world.redis.exists(reaper_key("missing"))
    assert world.redis.hvals(shortages_key()) == [b"1"]
    assert 0 < world.redis.ttl(shortages_key()) <= 86_400  # the queue may become idle before the next check
    assert world.waiting() == []


def test_cost_of_a_check_is_independent_of_the_queue_length(tmp_path: Path) -> None:
    with RedisServer.start(tmp_path) as server, Redis.from_url(server.url) as redis:  # that nobody else asks
        check_cost_of_a_look(World(redis))


def check_cost_of_a_look(world: World) -> None:
    def num_calls() -> int:
        """Commands that Redis has run, those of scripts included."""
        return sum(command["calls"] for command in world.redis.info("commandstats").values())

    def num_commands(num_jobs: int) -> int:
        jobs = [submission(QUEUE) for _ in range(num_jobs)]
        for start in range(0, num_jobs, 100):
            world.ledger.submit(jobs[start : start + 100])
        world.look(times=1)  # so that Redis knows the scripts
        before = num_calls()
        world.look(times=1)
        return num_calls() - before

    assert num_commands(PAGE) == num_commands(2 * PAGE)  # in two parts
    assert world.redis.zcard(missing_key()) == 0


def test_tickets_of_finished_jobs_are_removed_from_a_long_unserved_queue(world: World) -> None:
    jobs = [submission(QUEUE) for _ in range(2100)]
    for start in range(0, len(jobs), 100):
        world.ledger.submit(jobs[start : start + 100])
    for job in jobs[:60]:
        assert world.ledger.cancel(job.job_id, running=True)
        world.ledger.settle(job.job_id)
    assert len(world.waiting()) == len(jobs) - 60


def test_lost_job_is_found_behind_a_thousand_held_jobs(world: World) -> None:
    for _ in range(1001):
        take(world.ledger, world.job(ticket=False))
    lost = world.job(ticket=False)
    world.look()
    assert world.waiting() == [lost]


def test_indexed_job_without_an_entry_is_removed_from_the_index(world: World) -> None:
    job_id = world.job(ticket=False, timeout_s=0.001)
    world.redis.zadd(running_key(), {"other": 1})
    world.redis.delete(job_key(job_id))  # a Redis that evicts
    world.look()
    assert world.waiting() == []
    assert not world.redis.exists(running_key(), waiting_key(QUEUE), due_key(), missing_key())
    world.look(times=1)
    assert not world.redis.exists(queues_key())


def test_message_without_an_entry_is_left_for_a_worker_to_reject(world: World) -> None:
    job_id = world.job()
    world.redis.delete(job_key(job_id))  # a Redis that evicts, or a plain producer that sends headers of ours
    world.look()
    assert world.waiting() == [job_id]


def test_timeouts_end_waiting_jobs_but_not_running_jobs(world: World) -> None:
    tasks = ("generate", "chat", "embed", "rerank", "tokenize")
    running = world.job(timeout_s=0.001)
    begin(world.ledger, running, token=take(world.ledger, running).token)
    late = {task: world.job(timeout_s=0.001, task=f"cellama.{task}") for task in tasks}
    wait_until(lambda: world.look(times=1) or len(world.stored) == len(late), "the ends of late jobs")
    ends = dict(world.stored)
    results = {task: ends[job_id].result or ends[job_id].event["code"] for task, job_id in late.items()}
    assert results["generate"]["finish_reason"] == "timeout"
    assert results["chat"]["message"] == {"role": "assistant", "content": ""}
    assert results["embed"] == results["rerank"] == results["tokenize"] == "timeout"
    assert world.ledger.state(running) == "running"


def test_job_that_celery_rejects_is_ended(world: World) -> None:
    job_id = world.job()
    world.ledger.release(take(world.ledger, job_id))
    world.redis.zadd(due_key(), {job_id: 1})
    world.look()
    assert [(name, ending.event["code"]) for name, ending in world.stored] == [(job_id, "refused")]


def test_job_that_was_handed_back_times_out_with_its_partial_text(world: World) -> None:
    job_id = world.job(timeout_s=0.001)
    taken = take(world.ledger, job_id)
    attempt = begin(world.ledger, job_id, token=taken.token)
    write(world.ledger, attempt, events.started("m", 1, "w", 1), events.token("Once", [1, 2]))
    world.ledger.requeue(taken)
    wait_until(lambda: world.look(times=1) or world.stored, "the end")
    ((_, ending),) = world.stored
    assert ending.result is not None
    assert (ending.result["text"], ending.result["usage"]["completion_tokens"]) == ("Once", 2)
    assert world.redis.xlen(journal_key(job_id)) == 3


def test_reaper_stores_an_outcome_that_no_worker_stored(world: World) -> None:
    job_id = world.job()
    attempt = begin(world.ledger, job_id, token=take(world.ledger, job_id).token)
    write(world.ledger, attempt, events.error("x", "y", False))
    world.look(times=1)
    world.redis.zadd(due_key(), {job_id: 1})
    world.look(times=1)
    assert world.stored == []  # its worker still holds the message
    world.redis.zadd(leases_key(), {job_id: 1})
    world.look()
    assert [(name, ending.event["code"]) for name, ending in world.stored] == [(job_id, "x")]
    assert not world.redis.exists(due_key())

"""The reaper on a real Redis: what is lost is found once, what is only slow is left alone."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cellama.api.redis_server import RedisServer
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.keys import REAPER_KEY, RUNNING_KEY, UNACKED_KEY, waiting_key
from cellama.tasks.contract.names import queue_key
from cellama.tasks.ledger import Ledger, new_run
from cellama.tasks.reaper import SETTLED_S, Reaper
from cellama.tasks.records import Call, Entry

from ..conftest import wait_until


class World:
    """A queue of its own, and a reaper that notes what it does."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.ledger = Ledger(redis)
        self.queue = f"cellama:{uuid.uuid4().hex[:8]}"
        self.requeued: list[str] = []
        self.expired: list[tuple[str, Any]] = []
        self.reaper = Reaper(redis, self.ledger, self._requeue, lambda *job: self.expired.append(job), 0.0)

    def _requeue(self, job_id: str, call: dict[str, Any]) -> None:
        assert call["queue"] == self.queue
        self.requeued.append(job_id)

    def job(self, *, age_s: float = 0.0, message: bool = True, priority: int = 3, **call: Any) -> str:
        """A job that was submitted some time ago, with its message in the queue."""
        job_id = str(uuid.uuid4())
        values: dict[str, Any] = {"task": "cellama.generate", "timeout_s": None, **call}
        self.ledger.submit(
            job_id, Call(args=["m", "p"], kwargs={}, queue=self.queue, priority=priority, headers={}, **values)
        )
        self.redis.zincrby(waiting_key(self.queue), -age_s, job_id)
        if message:
            self.redis.lpush(queue_key(self.queue, priority), json.dumps({"headers": {"id": job_id}}))
        return job_id

    def look(self, times: int = 2) -> None:
        for _ in range(times):
            self.redis.delete(REAPER_KEY)
            self.reaper.look()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A Redis of its own: other tests have jobs that are lost or late, too."""
    with RedisServer.start(tmp_path) as server, Redis.from_url(server.url) as redis:
        yield World(redis)


OLD_S = 3 * SETTLED_S


@pytest.mark.parametrize("others", [0, 3])
def test_job_older_than_the_head_of_its_queue_is_lost_if_nobody_holds_it(world: World, others: int) -> None:
    lost = world.job(age_s=OLD_S, message=False)
    for _ in range(others):
        world.job()
    world.look(times=1)
    assert world.requeued == []
    world.look(times=1)
    assert world.requeued == [lost]


def test_jobs_in_the_queue_or_held_or_young_are_not_lost(world: World) -> None:
    for age_s in (OLD_S, OLD_S / 2, 0.0):
        world.job(age_s=age_s)
    world.job(message=False)
    held = world.job(age_s=OLD_S, message=False, priority=9)
    world.redis.hset(UNACKED_KEY, held, json.dumps([{"headers": {"id": held}}, "", world.queue]))
    world.look()
    world.redis.hdel(UNACKED_KEY, held)
    assert world.requeued == []


def test_job_whose_worker_and_message_are_gone_is_lost(world: World) -> None:
    job_id = world.job(message=False)
    attempt = world.ledger.begin(job_id, new_run(), "w")
    world.ledger.write([Entry(job_id, attempt.number, {"seq": 0, "type": "started"})])
    world.look()
    assert world.requeued == [job_id]


def test_job_that_is_noted_but_has_ended_is_noted_no_more(world: World) -> None:
    job_id = str(uuid.uuid4())
    world.redis.zadd(RUNNING_KEY, {job_id: time.time()})
    world.look()
    assert world.requeued == []
    assert world.redis.zscore(RUNNING_KEY, job_id) is None


def test_timeouts_end_what_waits_and_leave_what_runs(world: World) -> None:
    late = world.job(timeout_s=0.001)
    texts = world.job(timeout_s=0.001, task="cellama.embed")
    running = world.job(timeout_s=0.001)
    world.ledger.begin(running, new_run(), "w")
    wait_until(lambda: world.look(times=1) or len(world.expired) == 2, "the ends of late jobs")
    ends = dict(world.expired)
    assert ends.keys() == {late, texts}
    assert ends[late]["finish_reason"] == "timeout"
    assert isinstance(ends[texts], JobFailed)
    assert [world.ledger.state(job_id) for job_id in (late, texts, running)] == ["done", "done", "running"]


def test_job_that_is_queued_again_is_the_next(world: World) -> None:
    first, again = world.job(), world.job()
    world.ledger.to_the_front(again, world.queue, 3)
    world.ledger.to_the_front("somebody else", world.queue, 3)
    messages: Any = world.redis.lrange(queue_key(world.queue, 3), 0, -1)
    assert [json.loads(message)["headers"]["id"] for message in messages] == [first, again]

"""cellama and another Celery app on the same Redis database neither take nor return each other's messages."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import generate
from cellama.tasks.contract.keys import leases_key
from cellama.tasks.contract.names import queue_name

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment, wait_until
from .conftest import GREEDY

LEASE_S = 3
NUM_TASKS = 4
NEIGHBOUR = """
from celery import Celery
from redis import Redis

app = Celery("neighbour", broker="{url}", backend="{url}")
app.conf.task_acks_late = True  # else an early ack hides what happens to messages

@app.task(name="neighbour.wait")
def wait(number):
    with Redis.from_url("{url}", socket_timeout=None) as redis:
        redis.incr("neighbour:starts:%d" % number)
        redis.blpop(["neighbour:gate"], timeout=120)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Return a separate Redis, because the other app's keys have names that cellama does not use."""
    with RedisServer.start(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def neighbour(tmp_path: Path, server: RedisServer) -> Iterator[Celery]:
    """Return a plain Celery app with a running worker, without cellama."""
    (tmp_path / "neighbour.py").write_text(NEIGHBOUR.format(url=server.url))
    argv = [sys.executable, "-m", "celery", "-A", "neighbour", "worker", "--pool", "threads", "-c", str(NUM_TASKS)]
    with (tmp_path / "neighbour.log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=tmp_path, env=clean_environment(), stdout=log, stderr=log)
    yield Celery("neighbour", broker=server.url, backend=server.url, set_as_current=False)
    process.kill()
    process.wait(PATIENCE_S)


@pytest.fixture
def worker(tmp_path: Path, server: RedisServer) -> Iterator[WorkerProcess]:
    process = WorkerProcess(tmp_path, server.url, CELLAMA_LEASE_S=str(LEASE_S))
    yield process
    process.stop()


def test_long_tasks_of_another_celery_app_on_the_same_redis_run_once(
    neighbour: Celery, worker: WorkerProcess, server: RedisServer
) -> None:
    worker.wait_ready()
    with Redis.from_url(server.url) as redis:
        tasks = [neighbour.send_task("neighbour.wait", [number]) for number in range(NUM_TASKS)]
        starts = [f"neighbour:starts:{number}" for number in range(NUM_TASKS)]
        wait_until(lambda: redis.exists(*starts) == NUM_TASKS, "all tasks begun")
        begun_at = float(str(redis.time()[0]))
        ours = Celery(broker=server.url, backend=server.url, set_as_current=False)  # a plain Celery producer
        params = {"max_tokens": 8, **GREEDY}
        jobs = []
        while float(str(redis.time()[0])) < begun_at + 2 * LEASE_S:
            args = ["tiny", f"Once upon a time {uuid.uuid4()}"]
            jobs.append(ours.send_task(generate.name, args, params, queue=queue_name("tiny"), priority=3))
            jobs[-1].get(timeout=PATIENCE_S)
        assert redis.mget(starts) == [b"1"] * NUM_TASKS
        redis.rpush("neighbour:gate", *range(NUM_TASKS))
        for task in tasks:
            task.get(timeout=PATIENCE_S)
        assert redis.mget(starts) == [b"1"] * NUM_TASKS
        assert all(job.successful() for job in jobs)
        wait_until(lambda: not redis.exists("unacked", leases_key()), "all messages acked")

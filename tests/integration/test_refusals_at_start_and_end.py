"""Workers that start or stop while Redis refuses commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from ..refusing_redis import RefusingRedis, everything, needs_memory
from .conftest import MEDIUM, STORY, check_whole, read, wait_for_token

BUSY = "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."
FULL = "OOM command not allowed when used memory > 'maxmemory'. script: f_1, on @user_script:30."

Start = Callable[[], WorkerProcess]


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[RefusingRedis]:
    with RedisServer.start(tmp_path / "redis") as server:
        proxy = RefusingRedis(server)
        yield proxy
        proxy.close()


@pytest.fixture
def start(proxy: RefusingRedis, tmp_path: Path) -> Iterator[Start]:
    started: list[WorkerProcess] = []

    def start() -> WorkerProcess:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(WorkerProcess(folder, proxy.url, CELLAMA_DRAIN_S="1", CELLAMA_LEASE_S="3"))
        return started[-1]

    yield start
    for worker in started:
        worker.stop()


@pytest.mark.parametrize(("reply", "refuses"), [(BUSY, everything), (FULL, needs_memory)])
def test_starting_worker_waits_during_refusals_and_then_runs_jobs(
    proxy: RefusingRedis, start: Start, reply: str, refuses: Callable[[str, bytes], bool]
) -> None:
    with proxy.refusing(reply, refuses) as refused:
        worker = start()
        wait_until(lambda: refused["SETRANGE"] > 1, "the worker's check whether Redis accepts writes")
        assert worker.process.poll() is None
    with Client(proxy.url) as client:
        assert client.generate("tiny", STORY, wait=True, **MEDIUM).result(PATIENCE_S)["text"]
    assert worker.process.poll() is None


def test_worker_exits_while_redis_is_full_and_its_jobs_run_on_another_worker(
    proxy: RefusingRedis, start: Start
) -> None:
    """One job runs on the worker. The message of another job has been taken from its queue, but no worker holds it."""
    first = start().wait_ready()
    with Client(proxy.url) as client, Redis.from_url(proxy.direct_url) as redis, Client(proxy.direct_url) as direct:
        undisturbed = client.generate("tiny", STORY, **MEDIUM).result(PATIENCE_S)["text"]
        with first.slowed():
            running = client.generate("tiny", STORY, stream=True, **MEDIUM)
            wait_for_token(redis, running.id)
            with proxy.refusing(FULL, needs_memory):
                waiting = direct.generate("tiny", STORY, stream=True, **MEDIUM)
                wait_until(lambda: not redis.keys("cellama:queue:tiny*"), "the message is taken from its queue")
                assert not redis.hexists(f"cellama:job:{waiting.id}", "holder")
                first.process.terminate()
                assert first.process.wait(PATIENCE_S) == 0
        start().wait_ready()
        for job in (running, waiting):
            assert job.result(PATIENCE_S)["text"] == undisturbed
            check_whole(read(redis, job.id), undisturbed)
    assert "Traceback" not in first.log()

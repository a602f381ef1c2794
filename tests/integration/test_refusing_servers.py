"""Real Redis servers refuse commands for a while, each for a different reason. test_refusals.py uses a proxy."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer, free_port
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.contract.errors import RedisFull, RedisUnreachable
from cellama.tasks.contract.keys import job_key
from cellama.tasks.state.ledger import Ledger

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import MEDIUM, STORY, check_whole, read, wait_for_token
from .ledgers import begin, submit

Refusing = Callable[[Redis, RedisServer], contextlib.AbstractContextManager[None]]
WAITS, RESUMES = "Redis refuses commands", "Redis accepts commands again"


@contextlib.contextmanager
def full(redis: Redis, server: RedisServer) -> Iterator[None]:
    redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        redis.config_set("maxmemory", 0)


@contextlib.contextmanager
def without_replicas(redis: Redis, server: RedisServer) -> Iterator[None]:
    redis.config_set("min-replicas-to-write", 1)
    try:
        yield
    finally:
        redis.config_set("min-replicas-to-write", 0)


@contextlib.contextmanager
def without_disk(redis: Redis, server: RedisServer) -> Iterator[None]:
    """Make snapshots fail by creating a directory with the name of their file."""
    (server.data_dir / "dump.rdb" / "in the way").mkdir(parents=True, exist_ok=True)
    redis.config_set("save", "3600 1")
    redis.bgsave()
    wait_until(lambda: info(redis, "persistence")["rdb_last_bgsave_status"] == "err", "a snapshot that failed")
    try:
        yield
    finally:
        redis.config_set("save", "")


@contextlib.contextmanager
def read_only(redis: Redis, server: RedisServer) -> Iterator[None]:
    """Make Redis a replica of a missing master, so that its data does not change."""
    redis.replicaof("127.0.0.1", free_port())
    try:
        yield
    finally:
        redis.replicaof("NO", "ONE")


@contextlib.contextmanager
def busy(redis: Redis, server: RedisServer) -> Iterator[None]:
    """Run a long script of another application."""
    redis.config_set("lua-time-limit", 20)

    def run() -> None:
        with contextlib.suppress(ResponseError), Redis.from_url(server.url) as other:
            other.eval("while true do end", 0)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def is_busy() -> bool:
        try:
            return not redis.ping()
        except ResponseError:
            return True

    wait_until(is_busy, "a busy Redis")
    try:
        yield
    finally:
        redis.script_kill()
        thread.join()


@contextlib.contextmanager
def unblocking(redis: Redis, server: RedisServer) -> Iterator[None]:
    """Unblock a blocking command at the end, because the suspended worker may be between two of them."""

    def unblock() -> int:
        blocked = [client for client in redis.client_list() if client["cmd"] == "brpop"]
        return sum(int(redis.client_unblock(client["id"], error=True)) for client in blocked)

    yield
    wait_until(unblock, "a blocked command")


REFUSING: list[Refusing] = [full, without_replicas, without_disk, read_only, busy]


def info(redis: Redis, section: str) -> dict[str, Any]:
    found: Any = redis.info(section)
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer.start(tmp_path_factory.mktemp("redis"), admin_commands=True) as server:
        yield server


@pytest.fixture(scope="module")
def redis(server: RedisServer) -> Iterator[Redis]:
    with Redis.from_url(server.url) as redis:
        yield redis


@pytest.fixture(scope="module")
def worker(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Return a worker process that runs through all outages of this module."""
    process = WorkerProcess(tmp_path_factory.mktemp("worker"), server.url)
    yield process.wait_ready()
    assert process.stop() == 0, process.log()


@pytest.fixture(scope="module")
def client(server: RedisServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(client: Client, worker: WorkerProcess) -> str:
    text: str = client.generate("tiny", STORY, **MEDIUM).result(PATIENCE_S)["text"]
    return text


@pytest.mark.parametrize("refusing", REFUSING)
def test_each_refusal_is_temporary_and_retryable(
    refusing: Refusing,
    server: RedisServer,
    redis: Redis,
    client: Client,
) -> None:
    """This holds for the replies of the installed server, to commands and to scripts."""
    with connect(server.url) as own:
        ledger = Ledger(own)
        job_id = submit(ledger, "cellama:queue:refused")
        begin(ledger, submit(ledger, "cellama:queue:refused"))  # the script is known from now on
        with refusing(redis, server):
            for ask in (lambda: begin(ledger, job_id), lambda: own.set("cellama:key", "1")):
                with pytest.raises(RedisError) as refused:
                    ask()
                assert is_passing(refused.value)
            with pytest.raises(RedisFull if refusing is full else RedisUnreachable) as told:
                client.generate("tiny", STORY, wait=True)
            assert told.value.retryable
        assert begin(ledger, job_id).verdict == "run"


@contextlib.contextmanager
def stopped(worker: WorkerProcess) -> Iterator[Callable[[], None]]:
    """Suspend the process until the block ends or the yielded function is called."""
    worker.process.send_signal(signal.SIGSTOP)
    try:
        yield lambda: worker.process.send_signal(signal.SIGCONT)
    finally:
        worker.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("refusing", [*REFUSING, unblocking])
def test_worker_waits_and_its_jobs_finish_once_with_the_same_text(
    refusing: Refusing,
    worker: WorkerProcess,
    server: RedisServer,
    redis: Redis,
    client: Client,
    undisturbed: str,
) -> None:
    """One job runs, and another job arrives that the worker can't take."""
    waited = worker.log().count(WAITS)
    with worker.slowed():
        running = client.generate("tiny", STORY, stream=True, wait=True, **MEDIUM)
        wait_for_token(redis, running.id)
        with stopped(worker) as resume:
            waiting = client.generate("tiny", STORY, wait=True, **MEDIUM)
            with refusing(redis, server):
                resume()
                if refusing is not unblocking:
                    wait_until(lambda: worker.log().count(WAITS) > waited, "the log entry of the waiting worker")
                assert worker.process.poll() is None
        assert redis.hget(job_key(running.id), "state") == b"running"
    assert [job.result(PATIENCE_S)["text"] for job in (running, waiting)] == [undisturbed] * 2
    check_whole(read(redis, running.id), undisturbed)
    assert {redis.hget(job_key(job.id), "attempt") for job in (running, waiting)} == {b"1"}
    wait_until(lambda: worker.log().count(RESUMES) == worker.log().count(WAITS), "the end of the outage")
    assert worker.log().count(WAITS) <= waited + 1
    assert worker.process.poll() is None
    assert "job requeued" not in worker.log()

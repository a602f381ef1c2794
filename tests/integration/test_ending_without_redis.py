"""Workers that stop while Redis is unreachable exit, and their jobs resume elsewhere when Redis is back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kombu.exceptions import OperationalError

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.app import make_app
from cellama.tasks.connection.connections import connect

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import MEDIUM, RESUMED, STEP_S, STORY, check_whole, read, wait_for_token


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer.start(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def start_worker(server: RedisServer, tmp_path: Path) -> Iterator[Callable[[], WorkerProcess]]:
    started: list[WorkerProcess] = []

    def start() -> WorkerProcess:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        settings = {"CELLAMA_DRAIN_S": "1", "CELLAMA_LEASE_S": "3", "CELLAMA_TELEMETRY_LOG": "requests"}
        started.append(WorkerProcess(folder, server.url, **settings))
        return started[-1].wait_ready()

    yield start
    for worker in started:
        worker.stop()


@pytest.mark.parametrize("computed", [False, True])
def test_worker_exits_without_redis_and_its_job_resumes_on_another_worker(
    server: RedisServer, start_worker: Callable[[], WorkerProcess], computed: bool
) -> None:
    """If `computed` is true, only the end of the job still has to be written."""
    params, first = MEDIUM if computed else RESUMED, start_worker()
    with Client(server.url) as client, connect(server.url) as redis:
        undisturbed = client.generate("tiny", STORY, **params).result(PATIENCE_S)["text"]
        with first.slowed(STEP_S):
            job = client.generate("tiny", STORY, stream=True, **params)
            wait_for_token(redis, job.id)
            server.stop()
            if not computed:
                first.process.terminate()
                assert first.process.wait(PATIENCE_S) == 0
        if computed:
            wait_until(lambda: f'"request_id": "{job.id}' in first.log(), "the end of the job in the engine")
            first.process.terminate()
            assert first.process.wait(PATIENCE_S) == 0
        server.run()
        start_worker()
        assert job.result(PATIENCE_S)["text"] == undisturbed
        check_whole(read(redis, job.id), undisturbed)
    assert "Traceback" not in first.log()


@pytest.mark.parametrize("sends", ["a command", "an answer"])
def test_remote_control_waits_until_redis_is_back(server: RedisServer, sends: str) -> None:
    """Flower's threads send commands in this way, and a worker's event loop sends the replies."""
    app = make_app(server.url)
    with app.connection_for_write() as connection:
        node = app.control.mailbox(connection).Node("worker", channel=connection.default_channel)

        def send() -> None:
            if sends == "a command":
                app.control.broadcast("enable_events", connection=connection)
            else:
                node.reply({}, exchange="reply.celery.pidbox", routing_key="asker", ticket="1")

        send()
        server.stop()
        failed: list[OperationalError] = []

        def fail() -> None:
            with pytest.raises(OperationalError) as caught:
                send()
            failed.append(caught.value)

        threading.Thread(target=fail, daemon=True).start()
        wait_until(lambda: failed, "the end of the attempts")
        server.run()
        send()


def test_heartbeat_on_a_lost_connection_does_not_block_worker_exit(server: RedisServer) -> None:
    """Celery's event loop sends the heartbeat in this way before it detects that the worker is stopping."""
    app = make_app(server.url)
    with app.connection_for_write() as connection:
        dispatcher = app.events.Dispatcher(connection)
        dispatcher.send("worker-online", retry=True)
        server.stop()
        beat = threading.Thread(target=dispatcher.send, args=("worker-heartbeat",), kwargs={"retry": True}, daemon=True)
        beat.start()
        wait_until(lambda: not beat.is_alive(), "the end of the attempt")
        server.run()
        with connect(server.url) as redis, redis.pubsub() as listener:
            listener.psubscribe("*celeryev/worker.heartbeat")
            wait_until(redis.pubsub_numpat, "the subscription")
            dispatcher.flush()
            wait_until(lambda: (said := listener.get_message()) and said["type"] == "pmessage", "what was kept")

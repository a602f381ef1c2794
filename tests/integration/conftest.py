"""Fixtures for the Redis of the test run: clients, readers, jobs, and workers that serve only one test."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.harness import pace
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.reader import stream_events

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .ledgers import submit

GREEDY: dict[str, Any] = {"temperature": 0}
LONG: dict[str, Any] = {"max_tokens": 1900, "ignore_eos": True, **GREEDY}  # endless on a slowed worker
MEDIUM = {**LONG, "max_tokens": 100}
RESUMED = {**LONG, "max_tokens": 300}  # compared with its undisturbed text
STEP_S = 0.25  # per step of a slowed worker, so that RESUMED lasts for over a minute
STORY = "Once upon a time"

StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[Client]:
    with Client() as client:
        yield client


@pytest.fixture
def events_of(redis_client: Redis) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that reads all events of a job, up to the terminal event."""

    def read(job_id: str, after: int = -1) -> list[dict[str, Any]]:
        return list(stream_events(redis_client, job_id, after, timeout_s=PATIENCE_S))

    return read


@pytest.fixture
def unserved(redis_server: RedisServer) -> str:
    """Return the id of a model that no worker serves, so that its jobs stay in the queue."""
    return f"unserved-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def plain(redis_server: RedisServer) -> Iterator[Celery]:
    """Return a plain Celery app, without cellama."""
    with Celery("plain", broker=redis_server.url, backend=redis_server.url, set_as_current=False) as other:
        yield other


@pytest.fixture
def queue() -> str:
    return f"cellama:queue:ledger-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def ledger(redis_client: Redis) -> Ledger:
    return Ledger(redis_client)


@pytest.fixture
def job_id(ledger: Ledger, queue: str) -> str:
    return submit(ledger, queue)


@pytest.fixture
def model() -> str:
    """Return the id of a model that only the workers of this test serve."""
    return f"m{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start_worker(redis_server: RedisServer, tmp_path: Path, model: str) -> Iterator[StartWorker]:
    started: list[WorkerProcess] = []

    def start(
        slots: int = 4,
        strategy: str = pace.STRATEGY,
        step_s: float = 0.0,
        ready: bool = True,
        source: str = "bundled://tiny",
        python_path: str = "",
        **settings: Any,
    ) -> WorkerProcess:
        """Start a worker, whose steps take at least `step_s` seconds.

        With `ready`, wait until the worker is in the registry. `python_path` precedes the installed packages.
        """
        folder = tmp_path / str(len(started))
        folder.mkdir()
        if step_s:
            (folder / "pace").write_text(str(step_s))
        models = [{"id": model, "source": source, "n_parallel": slots, "threads": 1, "default": True}]
        models[0]["batch_strategy"] = strategy
        own = {f"CELLAMA_{name.upper()}": str(value) for name, value in settings.items()}
        if python_path:
            own["PYTHONPATH"] = python_path
        worker = WorkerProcess(
            folder, redis_server.url, name=f"w{len(started)}{model}", **own, CELLAMA_MODELS=json.dumps(models)
        )
        started.append(worker)
        return worker.wait_ready() if ready else worker

    yield start
    for worker in started:
        worker.stop()


def read(redis: Redis, job_id: str, after: int = -1) -> list[dict[str, Any]]:
    return list(stream_events(redis, job_id, after, timeout_s=PATIENCE_S))


def wait_for_token(redis: Redis, job_id: str) -> None:
    stream = stream_events(redis, job_id, timeout_s=PATIENCE_S)
    wait_until(lambda: next(stream)["type"] == "token", "the first token")


def check_whole(events: list[dict[str, Any]], text: str) -> None:
    """Check that the stream has no gaps, one terminal event, and this text."""
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events if event["type"] in ("started", "done", "error")] == ["started", "done"]
    assert "".join(event.get("text", "") for event in events) == text

"""Clients and readers on the Redis and the worker of the test run."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.state.reader import stream_events

from ..conftest import PATIENCE_S, WorkerProcess

GREEDY: dict[str, Any] = {"temperature": 0}
LONG: dict[str, Any] = {
    "max_tokens": 1900,
    "ignore_eos": True,
    **GREEDY,
}  # with a slowed worker: until it is ended


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[Client]:
    with Client() as client:
        yield client


@pytest.fixture
def events_of(redis_client: Redis) -> Callable[..., list[dict[str, Any]]]:
    """All events of a job, to its end."""

    def read(job_id: str, after: int = -1) -> list[dict[str, Any]]:
        return list(stream_events(redis_client, job_id, after, timeout_s=PATIENCE_S))

    return read


@pytest.fixture
def unserved(redis_server: RedisServer) -> str:
    """A model that no worker has: its jobs stay where they were put."""
    return f"unserved-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def plain(redis_server: RedisServer) -> Iterator[Celery]:
    """A Celery app that knows nothing of cellama."""
    with Celery("plain", broker=redis_server.url, backend=redis_server.url, set_as_current=False) as other:
        yield other

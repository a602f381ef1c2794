"""Clients and readers on the Redis and the worker of the test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from cellama.api import Client
from cellama.tasks.state.reader import stream_events

from ..conftest import PATIENCE_S, WorkerProcess

GREEDY: dict[str, Any] = {"temperature": 0}
LONG: dict[str, Any] = {
    "max_tokens": 1900,
    "ignore_eos": True,
    **GREEDY,
}  # with a slowed worker: until somebody ends it


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

"""Client and AsyncClient end the streams of ended jobs at once, whatever events are requested."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from cellama.api import AsyncClient, Client
from cellama.tasks.contract.errors import InvalidJob, StreamTrimmed, UnknownJob
from cellama.tasks.contract.keys import journal_key

from ..conftest import PATIENCE_S
from .conftest import GREEDY, STORY

Read = Callable[..., list[Any]]


def read_blocking(job_id: str, after: int = -1, **options: Any) -> list[Any]:
    with Client() as client:
        return list(client.stream(job_id, after, PATIENCE_S, **options))


def read_async(job_id: str, after: int = -1, **options: Any) -> list[Any]:
    async def read() -> list[Any]:
        async with AsyncClient() as client:
            return [event async for event in client.stream(job_id, after, PATIENCE_S, **options)]

    return asyncio.run(read())


@pytest.fixture(params=[read_blocking, read_async])
def read(request: pytest.FixtureRequest) -> Read:
    """Return a function that reads all events of a job with one of the clients."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def ended(client: Client) -> str:
    """Return the id of a job that has ended."""
    job = client.generate("tiny", STORY, max_tokens=4, **GREEDY)
    job.result(timeout=PATIENCE_S)
    return job.id


def test_stream_that_starts_after_the_last_event_yields_nothing(read: Read, ended: str) -> None:
    events = read(ended)
    assert events[-1]["type"] == "done"
    last = events[-1]["seq"]
    assert read(ended, after=last - 1) == events[-1:]
    assert read(ended, after=last) == read(ended, after=last + 1) == read(ended, after=10**9) == []
    assert read(ended, after=last, cancel_on_exit=True) == []


def test_stream_raises_when_the_journal_has_expired(read: Read, ended: str, redis_client: Redis) -> None:
    last = read(ended)[-1]["seq"]
    redis_client.delete(journal_key(ended))
    with pytest.raises(UnknownJob, match="has expired"):
        read(ended)
    with pytest.raises(StreamTrimmed, match=f"events 1 to {last} of job {ended} have expired"):
        read(ended, after=0)
    assert read(ended, after=last) == []


def test_stream_that_starts_beyond_the_last_event_stops_when_the_job_ends(client: Client, unserved: str) -> None:
    job = client.generate(unserved, STORY, wait=True)
    found: list[Any] = []
    pinged = threading.Event()

    def follow() -> None:
        for event in client.stream(job.id, after=7, timeout=math.inf, ping=0.05):
            found.append(event["type"])
            pinged.set()

    reading = threading.Thread(target=follow, daemon=True)
    reading.start()
    assert pinged.wait(PATIENCE_S)  # it waits for the job
    job.cancel()
    reading.join(PATIENCE_S)
    assert not reading.is_alive()
    assert set(found) == {"ping"}


def test_stream_immediately_rejects_an_invalid_after_value(client: Client, ended: str) -> None:
    with pytest.raises(InvalidJob, match="after: -2 is not"):
        client.stream(ended, after=-2)

    async def ask() -> None:
        async with AsyncClient() as own:
            with pytest.raises(InvalidJob, match="after: -2 is not"):
                own.stream(ended, after=-2)

    asyncio.run(ask())

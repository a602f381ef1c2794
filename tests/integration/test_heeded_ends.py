"""The end of a job is announced in the step that writes it: tasks/state/lua/ledger.lua, api/webhooks/announcing.py."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from cellama.api.machine.redis_server import RedisServer
from cellama.api.webhooks.announcing import announced, announcement, notify_on_end
from cellama.tasks.contract import events
from cellama.tasks.contract.events import Event
from cellama.tasks.contract.keys import announcement_key, webhook_events_key
from cellama.tasks.state.ledger import Ledger

from ..conftest import empty_database
from .ledgers import DONE, STARTED, begin, submit, write

FAILED = events.error("invalid_request", "it broke", retryable=False)


@pytest.fixture
def database(redis_server: RedisServer) -> Iterator[str]:
    """One that no gateway delivers from."""
    with empty_database(redis_server, 9) as url:
        yield url


@pytest.fixture
def redis_client(database: str) -> Iterator[Redis]:
    with Redis.from_url(database) as redis:
        yield redis


@pytest.fixture
def heeded_job(database: str, ledger: Ledger, queue: str) -> str:
    """Return a waiting job whose end is announced as the end of resp_1."""
    job_id = str(uuid.uuid4())
    heed_now(database, job_id)
    return submit(ledger, queue, job_id=job_id)


def heed_now(url: str, job_id: str) -> None:
    async def run() -> None:
        async with AsyncRedis.from_url(url) as redis:
            await notify_on_end(redis, job_id, "response", "resp_1", "acme", 60)

    asyncio.run(run())


def told(redis: Redis) -> list[dict[str, str]]:
    return [announced(fields) for _, fields in redis.xrange(webhook_events_key())]


@pytest.mark.parametrize(
    ("end", "event_type"),
    [
        (DONE, "response.completed"),
        (events.done("length", {}), "response.incomplete"),
        (events.done("timeout", {}), "response.incomplete"),
        (events.done("cancelled", {}), "response.cancelled"),
        (FAILED, "response.failed"),
    ],
)
def test_requested_end_notification_is_sent_once(
    ledger: Ledger, heeded_job: str, database: str, redis_client: Redis, end: Event, event_type: str
) -> None:
    attempt = begin(ledger, heeded_job)
    write(ledger, attempt, STARTED)
    assert told(redis_client) == []
    for _ in range(2):
        write(ledger, attempt, end, seq=1)
    assert told(redis_client) == [announcement(event_type, "resp_1", "acme")]
    heed_now(database, heeded_job)  # by a repeated request
    assert not redis_client.exists(announcement_key(heeded_job))


def test_end_notification_is_sent_for_a_cancelled_waiting_job(
    ledger: Ledger, heeded_job: str, redis_client: Redis
) -> None:
    assert ledger.cancel(heeded_job, running=False)
    assert told(redis_client) == [announcement("response.cancelled", "resp_1", "acme")]


def test_end_notification_is_sent_for_a_job_that_redis_lost(ledger: Ledger, database: str, redis_client: Redis) -> None:
    heed_now(database, "lost")
    for _ in range(2):
        ledger.end_unknown("lost", FAILED)
    assert told(redis_client) == [announcement("response.failed", "resp_1", "acme")]


def test_end_notification_is_not_sent_without_a_request(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    write(ledger, begin(ledger, job_id), STARTED, DONE)
    assert told(redis_client) == []

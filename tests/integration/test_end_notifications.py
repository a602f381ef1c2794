"""The script that writes a job's end also announces it (tasks/state/lua/ledger.lua, api/webhooks/announcing.py)."""

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
    """Return the URL of a database that no gateway reads."""
    with empty_database(redis_server, 9) as url:
        yield url


@pytest.fixture
def redis_client(database: str) -> Iterator[Redis]:
    with Redis.from_url(database) as redis:
        yield redis


@pytest.fixture
def notified_job(database: str, ledger: Ledger, queue: str) -> str:
    """Return a waiting job whose end is announced as the end of resp_1."""
    job_id = str(uuid.uuid4())
    request_notification(database, job_id)
    return submit(ledger, queue, job_id=job_id)


def request_notification(url: str, job_id: str) -> None:
    async def run() -> None:
        async with AsyncRedis.from_url(url) as redis:
            await notify_on_end(redis, job_id, "response", "resp_1", "acme", 60)

    asyncio.run(run())


def sent(redis: Redis) -> list[dict[str, str]]:
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
    ledger: Ledger, notified_job: str, database: str, redis_client: Redis, end: Event, event_type: str
) -> None:
    attempt = begin(ledger, notified_job)
    write(ledger, attempt, STARTED)
    assert sent(redis_client) == []
    for _ in range(2):
        write(ledger, attempt, end, seq=1)
    assert sent(redis_client) == [announcement(event_type, "resp_1", "acme")]
    request_notification(database, notified_job)  # by a repeated request
    assert not redis_client.exists(announcement_key(notified_job))


def test_end_notification_is_sent_for_a_cancelled_waiting_job(
    ledger: Ledger, notified_job: str, redis_client: Redis
) -> None:
    assert ledger.cancel(notified_job, running=False)
    assert sent(redis_client) == [announcement("response.cancelled", "resp_1", "acme")]


def test_end_notification_is_sent_for_a_job_that_redis_lost(ledger: Ledger, database: str, redis_client: Redis) -> None:
    request_notification(database, "lost")
    for _ in range(2):
        ledger.end_unknown("lost", FAILED)
    assert sent(redis_client) == [announcement("response.failed", "resp_1", "acme")]


def test_end_notification_is_not_sent_unless_requested(ledger: Ledger, job_id: str, redis_client: Redis) -> None:
    write(ledger, begin(ledger, job_id), STARTED, DONE)
    assert sent(redis_client) == []

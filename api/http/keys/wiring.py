"""The connection to Redis by which a gateway checks keys."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cellama.tasks.connection.connections import connect_async

ANSWER_S = 2.0  # a request is not let in by a Redis that takes longer


def connect_keys(url: str | None = None) -> Redis:
    """Redis at the URL, or that of the settings. What is asked again, after a lost connection, has no other effect."""
    again = Retry(NoBackoff(), 1)
    return connect_async(url, socket_connect_timeout=ANSWER_S, socket_timeout=ANSWER_S, retry=again)

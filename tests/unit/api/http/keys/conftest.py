"""Keys and limits on a database of their own in the Redis of the test run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis as AsyncRedis

from cellama.api.keys.entry import KeyEntry
from cellama.api.keys.key_text import KeyText, new_key
from cellama.api.machine.redis_server import RedisServer

from .....conftest import empty_database

Run = Callable[[Callable[[AsyncRedis], Awaitable[Any]]], Any]


@pytest.fixture
def url(redis_server: RedisServer) -> Iterator[str]:
    """An empty database."""
    with empty_database(redis_server, 7) as url:
        yield url


@pytest.fixture
def run(url: str) -> Run:
    """Runs a function of an asynchronous client."""

    def run(ask: Callable[[AsyncRedis], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            async with AsyncRedis.from_url(url) as redis:
                return await ask(redis)

        return asyncio.run(connected())

    return run


def key_and_entry(**fields: Any) -> tuple[KeyText, KeyEntry]:
    key = new_key()
    return key, KeyEntry.model_validate({"id": key.id, "digest": key.digest, "tenant": "acme", **fields})

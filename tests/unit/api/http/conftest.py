"""Fixtures that give each test an empty database of the Redis server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis as AsyncRedis

from cellama.api.http.files.store import DirectoryStore, FileStore, UrlStore
from cellama.api.machine.redis_server import RedisServer

from ....conftest import empty_database

Run = Callable[[Callable[[AsyncRedis], Awaitable[Any]]], Any]


@pytest.fixture
def url(redis_server: RedisServer) -> Iterator[str]:
    """Return the URL of an empty database."""
    with empty_database(redis_server, 7) as url:
        yield url


@pytest.fixture
def run(url: str) -> Run:
    """Return a function that runs a coroutine function with an asynchronous client."""

    def run(scenario: Callable[[AsyncRedis], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            async with AsyncRedis.from_url(url) as redis:
                return await scenario(redis)

        return asyncio.run(connected())

    return run


@pytest.fixture(params=["directory", "url"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FileStore:
    if request.param == "directory":
        return DirectoryStore(tmp_path / "store")
    return UrlStore(f"file://{tmp_path}/store", tmp_path / "work")

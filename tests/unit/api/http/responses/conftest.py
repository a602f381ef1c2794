"""Fixtures of a gateway with an empty database of the Redis server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from cellama.api.http.auth import NoKeys
from cellama.api.http.gateway import Gateway
from cellama.api.machine.redis_server import RedisServer
from cellama.config import get_settings

from .....conftest import empty_database

Scenario = Callable[[Gateway], Awaitable[Any]]


@pytest.fixture
def url(redis_server: RedisServer, settings_environment: Callable[..., None]) -> Iterator[str]:
    with empty_database(redis_server, 6) as url:
        settings_environment(redis_url=url)
        yield url


@pytest.fixture
def redis(url: str) -> Iterator[Redis]:
    with Redis.from_url(url) as redis:
        yield redis


@pytest.fixture
def run(url: str) -> Callable[[Scenario], Any]:
    def run(scenario: Scenario) -> Any:
        async def with_gateway() -> Any:
            gateway = Gateway(get_settings(), NoKeys())
            try:
                return await scenario(gateway)
            finally:
                await gateway.close()

        return asyncio.run(with_gateway())

    return run

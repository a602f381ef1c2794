"""Fixtures that run batches with each kind of store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from cellama.api.http.files.store import FileStore

from .world import World, settings_for

RunWorld = Callable[[Callable[[World], Awaitable[Any]]], Any]


@pytest.fixture
def run_world(url: str, store: FileStore, tmp_path: Path) -> RunWorld:
    """Return a function that runs a test in a world."""

    def run(scenario: Callable[[World], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            async with Redis.from_url(url) as redis:
                return await scenario(World(redis, settings_for(url, tmp_path), store, tmp_path))

        return asyncio.run(connected())

    return run

"""How the gateway's commands ask Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis

from cellama.tasks.connection.connections import connect_async
from cellama.tasks.connection.redis_errors import reaching_redis

CONNECT_TIMEOUT_S = 3.0
_T = TypeVar("_T")


def ask_redis(ask: Callable[[Redis], Awaitable[_T]]) -> _T:
    """What it answers to whom is given a connection. Raises QueueError if Redis can't be reached."""

    async def asked() -> _T:
        async with connect_async(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
            return await ask(redis)

    with reaching_redis():
        return asyncio.run(asked())

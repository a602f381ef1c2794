"""What all endpoints of an app share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from functools import cached_property
from typing import Any

from redis.asyncio import Redis
from starlette.requests import Request

from cellama.api.client.async_client import AsyncClient
from cellama.api.client.client import CONNECT_TIMEOUT_S
from cellama.config import Settings
from cellama.tasks.connection.connections import connect_async
from cellama.tasks.contract.errors import JobError

from .callers import Access
from .counting import Counts
from .directory import Directory
from .visit import BodyMemory


class Gateway:
    """One client of the queue, made when it is first needed: an app that mounts ours may never say that it begins."""

    def __init__(self, settings: Settings, access: Access) -> None:
        self.settings = settings
        self.access = access
        self.counts = Counts()
        self.body_memory = BodyMemory(settings.gateway_bodies_bytes, settings.gateway_key_bodies_bytes)
        self._afterwards: dict[asyncio.Task[None], bool] = {}  # and whether it is cut short by `close`

    @cached_property
    def client(self) -> AsyncClient:
        return AsyncClient(self.settings.redis_url)

    @cached_property
    def redis(self) -> Redis:
        """For what gateways themselves keep."""
        return connect_async(self.settings.redis_url, socket_connect_timeout=CONNECT_TIMEOUT_S)

    @cached_property
    def directory(self) -> Directory:
        return Directory(self.client)

    def afterwards(self, work: Coroutine[Any, Any, object], *, until_close: bool = False) -> None:
        """Does this although the request that wants it may be cancelled; a job that can't be reached is let be.

        What goes on `until_close` is cancelled then; all else is waited for.
        """

        async def do() -> None:
            with contextlib.suppress(JobError):
                await work

        task = asyncio.create_task(do())
        self._afterwards[task] = until_close
        task.add_done_callback(self._afterwards.pop)

    async def close(self) -> None:
        """Ends what requests have left to do, and gives the connections back."""
        for task, until_close in self._afterwards.items():
            if until_close:
                task.cancel()
        while self._afterwards:
            await asyncio.wait(self._afterwards)
        await self.access.close()
        if "redis" in self.__dict__:
            await self.redis.aclose()
        if "client" in self.__dict__:
            await self.client.close()


def gateway_of(request: Request) -> Gateway:
    """That of the app that has the request."""
    gateway: Gateway = request.app.state.gateway
    return gateway

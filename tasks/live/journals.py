"""Read the journals of many jobs over one connection: while one round trip is under way, the next reads gather."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from cellama.tasks.state.reader import NUM_REPLIES, JournalPage, ask_for_page, page_of

LOOKS = 32  # readers per round trip, whose replies are in memory at the same time


@dataclass(slots=True)
class _Look:
    job_id: str
    start: str
    answer: asyncio.Future[JournalPage]


class Journals:
    """Reads journals for the readers of one event loop."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._looks: deque[_Look] = deque()
        self._task: asyncio.Task[None] | None = None

    async def look(self, job_id: str, start: str) -> JournalPage:
        """Return up to PAGE entries from this id on, and the state of the job. Raises RedisError."""
        look = _Look(job_id, start, asyncio.get_running_loop().create_future())
        self._looks.append(look)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), context=contextvars.Context())
        return await look.answer

    async def close(self) -> None:
        """End the connection. Readers that wait get a RuntimeError."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])
            if self._task is task:  # it had not begun, so nothing of it has run
                self._end([])

    async def _work(self) -> None:
        page: list[_Look] = []
        try:
            while self._looks:
                taken = [self._looks.popleft() for _ in range(min(LOOKS, len(self._looks)))]
                page = [look for look in taken if not look.answer.done()]  # else its reader has gone
                await self._answer(page)
        finally:
            self._end(page)

    def _end(self, page: list[_Look]) -> None:
        """Fail the reads that are left when the task was cancelled."""
        self._task = None
        for look in [*page, *self._looks]:
            if not look.answer.done():
                look.answer.set_exception(RuntimeError("the client was closed while a stream was read"))
        self._looks.clear()

    async def _answer(self, page: list[_Look]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for look in page:
            ask_for_page(pipe, look.job_id, look.start)
        try:
            replies = await pipe.execute(raise_on_error=False)
        except Exception as error:  # the readers', whatever it is
            replies = [error] * (NUM_REPLIES * len(page))
        for place, look in enumerate(page):
            if look.answer.done():
                continue
            own: list[Any] = replies[place * NUM_REPLIES : (place + 1) * NUM_REPLIES]
            if failures := [reply for reply in own if isinstance(reply, Exception)]:
                look.answer.set_exception(failures[0])
            else:
                look.answer.set_result(page_of(own))

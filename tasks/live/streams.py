"""Stream the events of many jobs to the readers in an event loop, over two connections.

`Journals` reads the journals of all jobs over one connection. Reads that arrive during a round trip share the next
round trip. `Streams` combines the journals with published messages.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.asyncio import Redis

from cellama.tasks.connection.connections import database_of
from cellama.tasks.contract.events import Event
from cellama.tasks.contract.keys import events_channel
from cellama.tasks.state.reader import (
    NUM_REPLIES,
    STREAM_TIMEOUT_S,
    EventCursor,
    JournalPage,
    ReadTimer,
    page_of,
    request_page,
)

from .subscriptions import Mailbox, RedisWire, Signal, Subscriptions, Wire

MAX_READS = 32  # per round trip, whose replies are in memory at the same time
MAX_QUIET_S = 8.0  # seconds between two reads of the journal of a known job without new events


@dataclass(slots=True)
class JournalRead:
    """A read of a job's journal, starting at the entry `start`."""

    job_id: str
    start: str
    page: asyncio.Future[JournalPage]


class Journals:
    """Reads journals for the readers in one event loop."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._reads: deque[JournalRead] = deque()
        self._task: asyncio.Task[None] | None = None

    async def read(self, job_id: str, start: str) -> JournalPage:
        """Return the state of the job, and up to PAGE entries, starting at the id `start`. Raises RedisError."""
        read = JournalRead(job_id, start, asyncio.get_running_loop().create_future())
        self._reads.append(read)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), context=contextvars.Context())
        return await read.page

    async def close(self) -> None:
        """Cancel all reads. Their readers receive a RuntimeError."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])
            if self._task is task:  # cancelled before it started
                self._end([])

    async def _work(self) -> None:
        reads: list[JournalRead] = []
        try:
            while self._reads:
                reads = [self._reads.popleft() for _ in range(min(MAX_READS, len(self._reads)))]
                reads = [read for read in reads if not read.page.done()]  # the others were cancelled
                await self._execute(reads)
        finally:
            self._end(reads)

    def _end(self, reads: list[JournalRead]) -> None:
        """Make the remaining reads fail, because the client was closed."""
        self._task = None
        for read in [*reads, *self._reads]:
            if not read.page.done():
                read.page.set_exception(RuntimeError("the client was closed while a stream was open"))
        self._reads.clear()

    async def _execute(self, reads: list[JournalRead]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for read in reads:
            request_page(pipe, read.job_id, read.start)
        try:
            replies = await pipe.execute(raise_on_error=False)
        except Exception as error:  # raised in the readers
            replies = [error] * (NUM_REPLIES * len(reads))
        for index, read in enumerate(reads):
            if read.page.done():
                continue
            read_replies: list[Any] = replies[index * NUM_REPLIES : (index + 1) * NUM_REPLIES]
            if failures := [reply for reply in read_replies if isinstance(reply, Exception)]:
                read.page.set_exception(failures[0])
            else:
                read.page.set_result(page_of(read_replies))


class Streams:
    """The streams of all readers in one event loop. Each stream behaves like `stream_events` in state/reader.py."""

    def __init__(self, redis: Redis, connect: Callable[[], Awaitable[Wire]] | None = None) -> None:
        """Use the client `redis`, which `close` also closes.

        `connect` opens the connection for published messages (default: RedisWire).
        """
        self._redis = redis
        self._subscriptions = Subscriptions(connect or partial(RedisWire.open, redis))
        self._journals = Journals(redis)

    async def events(
        self,
        job_id: str,
        after: int = -1,
        timeout_s: float = STREAM_TIMEOUT_S,
        ping_s: float = math.inf,
        cursor: EventCursor | None = None,
    ) -> AsyncIterator[Event]:
        """Yield the events of a job, with the same arguments and errors as `stream_events`."""
        cursor = cursor or EventCursor(job_id, after)
        timer = ReadTimer(job_id, timeout_s, ping_s, MAX_QUIET_S)
        with self._subscriptions.mailbox(events_channel(job_id, database_of(self._redis))) as box:
            cursor.needs_journal = False  # it is read once the channel is subscribed, so that no event is missed
            while not cursor.ended:
                last_seq = cursor.last_seq
                for event in await self._next_events(cursor, box, timer):
                    yield event
                if cursor.last_seq == last_seq:
                    for event in timer.ping():
                        yield event
                else:
                    timer.event_received()

    async def _next_events(self, cursor: EventCursor, box: Mailbox, timer: ReadTimer) -> Iterable[Event]:
        """Return the next events, if any, from the mailbox or from the journal."""
        if not cursor.needs_journal:
            found = await box.get(timer.wait_s())
            if not isinstance(found, Signal):
                return (event for message in found for event in cursor.from_published(message))
            if found is Signal.SUBSCRIBED:
                cursor.reconnected()
            elif found is Signal.SILENCE and not timer.take_journal_turn():
                return ()
        page = await self._journals.read(cursor.job_id, cursor.journal_start)
        timer.journal_read(page.is_known)
        return cursor.from_page(page)

    async def close(self) -> None:
        """Close all connections. The remaining readers receive a RuntimeError."""
        await self._subscriptions.close()
        await self._journals.close()
        await self._redis.aclose()

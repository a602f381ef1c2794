"""Streams of jobs for an event loop: any number of readers, over two connections."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial

from redis.asyncio import Redis

from cellama.tasks.connection.connections import database_of
from cellama.tasks.contract.events import Event
from cellama.tasks.contract.keys import events_channel
from cellama.tasks.state.reader import STREAM_TIMEOUT_S, EventCursor, Patience

from .journals import Journals
from .mailbox import Mailbox, Sign
from .subscriptions import Subscriptions
from .wire import RedisWire, Wire

MOST_QUIET_S = 8.0  # between two reads of the journal of a known job that writes nothing


class Streams:
    """All streams that are read in one event loop, as `stream_events` reads one (tasks/state/reader.py)."""

    def __init__(self, redis: Redis, connect: Callable[[], Awaitable[Wire]] | None = None) -> None:
        """Take over `redis`. `connect`, if given, makes the connection for published messages."""
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
        """Yield the events of a job as `stream_events` does."""
        cursor = cursor or EventCursor(job_id, after)
        patience = Patience(job_id, timeout_s, ping_s, MOST_QUIET_S)
        with self._subscriptions.mailbox(events_channel(job_id, database_of(self._redis))) as box:
            cursor.needs_journal = False  # before the channel is subscribed to it would miss what comes meanwhile
            while not cursor.ended:
                was = cursor.last_seq
                for event in await self._some(cursor, box, patience):
                    yield event
                if cursor.last_seq == was:
                    for event in patience.ping():
                        yield event
                else:
                    patience.heard()

    async def _some(self, cursor: EventCursor, box: Mailbox, patience: Patience) -> Iterable[Event]:
        """Return the next events, from the journal when it is time to read that."""
        if not cursor.needs_journal:
            found = await box.get(patience.wait_s())
            if not isinstance(found, Sign):
                return (event for message in found for event in cursor.from_published(message))
            if found is Sign.SUBSCRIBED:
                cursor.connected_again()
            elif found is Sign.SILENCE and not patience.is_look_due():
                return ()
        page = await self._journals.look(cursor.job_id, cursor.journal_start)
        patience.looked(page.is_known)
        return cursor.from_page(page)

    async def close(self) -> None:
        """End all connections. Readers that are left get a RuntimeError."""
        await self._subscriptions.close()
        await self._journals.close()
        await self._redis.aclose()

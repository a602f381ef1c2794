"""How streams were read before they shared a connection: each with a PubSub of redis-py of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis

from cellama.tasks.contract.events import Event
from cellama.tasks.contract.keys import events_channel, journal_key
from cellama.tasks.state.reader import PAGE, QUIET_S, EventCursor


async def events_of(redis: Redis, job_id: str) -> AsyncIterator[Event]:
    """The events of a job, to its end."""
    cursor = EventCursor(job_id)
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(events_channel(job_id, 0))
        await pubsub.get_message(timeout=None)
        while not cursor.ended:
            if cursor.needs_journal:
                entries: Any = await redis.xrange(journal_key(job_id), min=cursor.journal_start, count=PAGE)
                new = cursor.from_journal(entries)
            else:
                new = cursor.from_message(await pubsub.get_message(timeout=QUIET_S))
            for event in new:
                yield event

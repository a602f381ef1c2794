"""How streams were read before they shared a connection: each with a PubSub of redis-py of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

from redis.asyncio import Redis

from cellama.tasks.contract.events import Event
from cellama.tasks.contract.keys import events_channel
from cellama.tasks.state.reader import QUIET_S, EventCursor, ask_for_page, page_of


async def events_of(redis: Redis, job_id: str) -> AsyncIterator[Event]:
    """The events of a job, to its end."""
    cursor = EventCursor(job_id)
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(events_channel(job_id, 0))
        await pubsub.get_message(timeout=None)
        while not cursor.ended:
            if cursor.needs_journal:
                pipe = redis.pipeline(transaction=False)
                ask_for_page(pipe, job_id, cursor.journal_start)
                new = cursor.from_page(page_of(await pipe.execute()))
            else:
                new = cursor.from_message(await pubsub.get_message(timeout=QUIET_S))
            for event in new:
                yield event

"""Read a response's status and events from its job's journal or result. All readers get identical frames."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from cellama.api.http.errors import ApiError, not_found
from cellama.api.http.gateway import Gateway
from cellama.api.http.running import CANCELLED_S, RESULT_S
from cellama.api.http.sse import EventStream, frame, keep_alive, with_errors
from cellama.api.openai.responses.events import ResponseEvents, journal_of_result
from cellama.api.openai.responses.record import ResponseRecord
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import JobError
from cellama.tasks.contract.events import TERMINAL_TYPES
from cellama.tasks.contract.journal import events_in
from cellama.tasks.contract.keys import job_key, journal_key

EVENTS_PER_PAGE = 500  # reading a page blocks the event loop for some milliseconds
WaitOf = Callable[[str, str, str], Awaitable[str | None]]
Events = AsyncGenerator[Mapping[str, Any], None]


@dataclass(frozen=True, slots=True)
class ResponseStatus:
    """The current state of a response.

    `response` is the object that clients receive. When the response has ended, `finish_key` is the key of its context,
    or None if it has no context. `has_all_events` is False if events have expired, so the response can't be streamed.
    """

    response: dict[str, Any]
    has_ended: bool = False
    finish_key: str | None = None
    has_all_events: bool = True


async def status_of(gateway: Gateway, record: ResponseRecord) -> ResponseStatus:
    """Return a response's status. Raises ApiError (404) if the journal and the result of its job have expired."""
    journal = journal_key(record.job_id)
    with reaching_redis():
        pipe = gateway.redis.pipeline(transaction=False)
        pipe.xrevrange(journal, count=1)
        pipe.hmget(job_key(record.job_id), "state", "end")
        last, (state, end) = await pipe.execute()
    response_events = ResponseEvents(record)
    if last:
        event = events_in(last)[-1]
        if event["type"] not in TERMINAL_TYPES:
            response_events.of({"type": "started"})
            return ResponseStatus(response_events.response())
        if (from_journal := await _from_journal(gateway, record)) is not None:
            return from_journal
    if end is not None:
        return _ended(response_events, await _from_result(gateway, record, json.loads(end)))
    if state is not None:
        return ResponseStatus(response_events.response())
    raise not_found("response", record.id)


async def end_of(gateway: Gateway, record: ResponseRecord, timeout_s: float = CANCELLED_S) -> ResponseStatus:
    """Wait for the job to end for up to `timeout_s` seconds, and return the response's status."""
    with contextlib.suppress(TimeoutError, JobError):  # `status_of` reports problems of the stream
        async with asyncio.timeout(timeout_s):
            async for _ in gateway.client.stream(record.job_id, timeout=timeout_s):
                pass
    return await status_of(gateway, record)


def _ended(response_events: ResponseEvents, events: list[Mapping[str, Any]]) -> ResponseStatus:
    for event in events:
        response_events.of(event)
    finish_key = events[-1].get("finish_key")
    return ResponseStatus(
        response=response_events.response(), has_ended=True, finish_key=finish_key, has_all_events=False
    )


async def _from_journal(gateway: Gateway, record: ResponseRecord) -> ResponseStatus | None:
    """Return the response's status after its journal's last event, or None if some events have expired.

    Events are read in pages so that other requests can be served in between. A journal may contain as many events as
    the model's context has tokens.
    """
    response_events, after = ResponseEvents(record), "-"
    event: Any = None
    while True:
        with reaching_redis():
            entries: Any = await gateway.redis.xrange(journal_key(record.job_id), min=after, count=EVENTS_PER_PAGE)
        if not entries:
            break
        for found in events_in(entries):
            event_before, event = event, found
            if event_before is None and event["seq"] != 0:
                return None
            response_events.of(event)
        after = f"({entries[-1][0].decode()}"
    if event is None or event["type"] not in TERMINAL_TYPES:
        return None
    return ResponseStatus(response=response_events.response(), has_ended=True, finish_key=event.get("finish_key"))


async def _from_result(gateway: Gateway, record: ResponseRecord, end: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return events that replace an expired journal.

    The last event is read from the ledger, and all other events are derived from the result. A cancelled or failed job
    has no result, so its text has expired with its events.
    """
    if end["type"] == "error" or end["finish_reason"] == "cancelled":
        return [end]
    result: Any = await gateway.client.job(record.job_id).result(RESULT_S)
    return list(journal_of_result(result))


def stream_of(gateway: Gateway, record: ResponseRecord, after: int) -> EventStream:
    """Stream a response's events that are numbered above `after`, whether or not the response has ended."""
    events = _events(gateway, record)
    return EventStream(with_errors(frames(record, events, after, wait_of=gateway.wait_of), error_frame), events.aclose)


async def _events(gateway: Gateway, record: ResponseRecord) -> Events:
    ping_s = gateway.settings.gateway_keepalive_s
    stream = gateway.client.stream(record.job_id, timeout=math.inf, ping=ping_s)
    async with aclosing(stream) as events:  # type: ignore[type-var]
        async for event in events:
            yield event


async def frames(
    record: ResponseRecord, events: Events, after: int = -1, *, wait_of: WaitOf
) -> AsyncGenerator[bytes, None]:
    """Yield the frames that are numbered above `after`. `events` must start with the first event of the job.

    `wait_of` is `Gateway.wait_of`.
    """
    response_events, has_events = ResponseEvents(record), False
    if first := _frames(response_events.start(), after):
        yield first
    async with aclosing(events):
        async for event in events:
            if event["type"] == "ping":
                tier = record.shown["service_tier"]
                yield keep_alive(None if has_events else await wait_of(record.job_id, record.model, tier))
                continue
            has_events = True
            if made := _frames(response_events.of(event), after):
                yield made


def error_frame(error: ApiError) -> bytes:
    """Return the last frame of a stream that can't be continued. This frame has no sequence number."""
    return frame(error.envelope)


def _frames(events: list[dict[str, Any]], after: int) -> bytes:
    return b"".join(frame(event, event["type"]) for event in events if event["sequence_number"] > after)

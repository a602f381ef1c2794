"""What Redis has of a response's job: how far it is, and its events as frames, the same for every reader."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from cellama.api.http.errors import ApiError, not_there
from cellama.api.http.gateway import Gateway
from cellama.api.http.running import CANCELLED_S, RESULT_S
from cellama.api.http.sse import KEEP_ALIVE, EventStream, frame, with_errors
from cellama.api.openai.responses.events import Fold, journal_of_result
from cellama.api.openai.responses.record import ResponseRecord
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import JobError
from cellama.tasks.contract.events import EVENT_FIELD, TERMINAL_TYPES
from cellama.tasks.contract.keys import job_key, journal_key

EVENTS_PER_PAGE = 500  # some milliseconds of the event loop
Events = AsyncGenerator[Mapping[str, Any], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """`response` is the object. Of one that has ended `finish_key` names its context, if it has one; `is_whole` says
    whether its events are there, to be streamed."""

    response: dict[str, Any]
    has_ended: bool = False
    finish_key: str | None = None
    is_whole: bool = True


async def look(gateway: Gateway, record: ResponseRecord) -> Standing:
    """Raises ApiError (404) when nothing of the job is left."""
    journal = journal_key(record.job_id)
    with reaching_redis():
        pipe = gateway.redis.pipeline(transaction=False)
        pipe.xrevrange(journal, count=1)
        pipe.hmget(job_key(record.job_id), "state", "end")
        last, (state, end) = await pipe.execute()
    fold = Fold(record)
    if last:
        event = _event_of(last[0])
        if event["type"] not in TERMINAL_TYPES:
            fold.of({"type": "started"})
            return Standing(fold.response())
        if (whole := await _of_journal(gateway, record)) is not None:
            return whole
    if end is not None:
        return _ended(fold, await _kept(gateway, record, json.loads(end)), is_whole=False)
    if state is not None:
        return Standing(fold.response())
    raise not_there("response", record.id)


async def end_of(gateway: Gateway, record: ResponseRecord, timeout_s: float = CANCELLED_S) -> Standing:
    """How it stands when its job has ended, or after so long."""
    with contextlib.suppress(TimeoutError, JobError):  # what is wrong with the stream, a look tells better
        async with asyncio.timeout(timeout_s):
            async for _ in gateway.client.stream(record.job_id, timeout=timeout_s):
                pass
    return await look(gateway, record)


def _ended(fold: Fold, events: list[Mapping[str, Any]], *, is_whole: bool = True) -> Standing:
    for event in events:
        fold.of(event)
    finish_key = events[-1].get("finish_key")
    return Standing(response=fold.response(), has_ended=True, finish_key=finish_key, is_whole=is_whole)


async def _of_journal(gateway: Gateway, record: ResponseRecord) -> Standing | None:
    """By all events; None if some of them are gone. A page at a time, so that others are served in between: a
    conversation has as many events as its model's context has tokens."""
    fold, after, event = Fold(record), "-", None
    while True:
        with reaching_redis():
            entries: Any = await gateway.redis.xrange(journal_key(record.job_id), min=after, count=EVENTS_PER_PAGE)
        if not entries:
            break
        for entry in entries:
            event_before, event = event, _event_of(entry)
            if event_before is None and event["seq"] != 0:
                return None
            fold.of(event)
        after = f"({entries[-1][0].decode()}"
    if event is None or event["type"] not in TERMINAL_TYPES:
        return None
    return Standing(response=fold.response(), has_ended=True, finish_key=event.get("finish_key"))


async def _kept(gateway: Gateway, record: ResponseRecord, end: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A journal that comes to the same as the one that is gone: the end is in the ledger, the rest in the result. Who
    was cancelled or failed has none, and what there was of a text went with the events."""
    if end["type"] == "error" or end["finish_reason"] == "cancelled":
        return [end]
    result: Any = await gateway.client.job(record.job_id).result(RESULT_S)
    return list(journal_of_result(result))


def _event_of(entry: Any) -> Any:
    _, fields = entry
    return json.loads(fields[EVENT_FIELD.encode()])


def stream_of(gateway: Gateway, record: ResponseRecord, after: int) -> EventStream:
    """Of a response that goes on without this reader, or has ended: what is numbered above `after`."""
    events = _events(gateway, record)
    return EventStream(with_errors(frames(record, events, after), error_frame), events.aclose)


async def _events(gateway: Gateway, record: ResponseRecord) -> Events:
    ping_s = gateway.settings.gateway_keepalive_s
    stream = gateway.client.stream(record.job_id, timeout=math.inf, ping=ping_s)
    async with aclosing(stream) as events:  # type: ignore[type-var]
        async for event in events:
            yield event


async def frames(record: ResponseRecord, events: Events, after: int = -1) -> AsyncGenerator[bytes, None]:
    """The frames numbered above `after`, made of all events of the job from the first one on."""
    fold = Fold(record)
    if begun := _frames(fold.begin(), after):
        yield begun
    async with aclosing(events):
        async for event in events:
            if made := KEEP_ALIVE if event["type"] == "ping" else _frames(fold.of(event), after):
                yield made


def error_frame(error: ApiError) -> bytes:
    """The last frame of a stream that can't be read to its end. It has no number."""
    return frame(error.envelope)


def _frames(events: list[dict[str, Any]], after: int) -> bytes:
    return b"".join(frame(event, event["type"]) for event in events if event["sequence_number"] > after)

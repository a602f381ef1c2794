"""The frames of a response: the same, whoever reads them, and from wherever."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from cellama.api.http.errors import ApiError, of_job
from cellama.api.http.gateway import Gateway
from cellama.api.http.sse import KEEP_ALIVE, EventStream, frame
from cellama.api.openai.responses.events import Fold
from cellama.api.openai.responses.record import Record
from cellama.tasks.contract.errors import JobError

Events = AsyncGenerator[Mapping[str, Any], None]


def stream_of(gateway: Gateway, record: Record, after: int) -> EventStream:
    """Of a response that goes on without this reader, or has ended: what is numbered above `after`."""
    events = _events(gateway, record)
    return EventStream(frames(record, events, after), events.aclose)


async def _events(gateway: Gateway, record: Record) -> Events:
    ping_s = gateway.settings.gateway_keepalive_s
    stream = gateway.client.stream(record.job_id, timeout=math.inf, ping=ping_s)
    async with aclosing(stream) as events:  # type: ignore[type-var]
        async for event in events:
            yield event


async def frames(record: Record, events: Events, after: int = -1) -> AsyncGenerator[bytes, None]:
    """What is told of the events of the job, which are all from the first one on. Where they can't be read to the end
    the last frame has an error, and no number."""
    fold = Fold(record)
    if told := _frames(fold.begin(), after):
        yield told
    try:
        async with aclosing(events):
            async for event in events:
                if told := KEEP_ALIVE if event["type"] == "ping" else _frames(fold.of(event), after):
                    yield told
    except ApiError as error:
        yield frame(error.envelope)
    except JobError as error:
        yield frame(of_job(error).envelope)


def _frames(events: list[dict[str, Any]], after: int) -> bytes:
    return b"".join(frame(event, event["type"]) for event in events if event["sequence_number"] > after)

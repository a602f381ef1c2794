"""Announce events.

The operation that ends an object also stores the object's event, which any gateway can deliver later (ADR 021).
"""

from __future__ import annotations

import hashlib
import json

from redis.asyncio import Redis

from cellama.tasks.contract.keys import announcement_key, job_key

BATCH_ENDS = ("completed", "failed", "expired", "cancelled")
EVENT_TYPES = (
    *(f"batch.{end}" for end in BATCH_ENDS),
    *(f"response.{end}" for end in ("completed", "failed", "cancelled", "incomplete")),
)
_ENDS = {  # how a job ended, as in the queue's scripts → how its response ended
    "stop": "completed",
    "length": "incomplete",
    "timeout": "incomplete",
    "cancelled": "cancelled",
    "error": "failed",
}


def announcement(event_type: str, object_id: str, tenant: str | None) -> dict[str, str]:
    """Return the entry for the stream `webhook_events_key()`.

    The operation that ends a batch or a response adds this entry. The tenant's endpoints receive the event at least
    once. Repeated announcements have the same event id. Raises ValueError for an unknown type.
    """
    if event_type not in EVENT_TYPES:
        raise ValueError(f"event: {event_type!r} is unknown; use one of: {', '.join(EVENT_TYPES)}")
    return {"type": event_type, "object": object_id, "tenant": tenant or ""}


async def notify_on_end(redis: Redis, job_id: str, kind: str, object_id: str, tenant: str | None, ttl_s: int) -> None:
    """Request that the worker announce this object's end in the same operation that ends the job.

    Call this function before the job is queued. A call has no effect on a job that is already queued. `kind` is the
    first part of the event type, for example `response`. `ttl_s` must exceed the longest time that the job may take.
    The queue stores the announcement without parsing it. Raises RedisError.
    """
    event = json.dumps({"kind": kind, "object": object_id, "tenant": tenant or ""})
    if not await redis.exists(job_key(job_id)):
        await redis.set(announcement_key(job_id), event, ex=ttl_s)


def announced(fields: dict[bytes, bytes]) -> dict[str, str]:
    """Return the event in a stream entry that was written by `announcement` or by one of the queue's scripts.

    Raises ValueError.
    """
    event = {name.decode(): value.decode() for name, value in fields.items()}
    if "heeded" in event:
        request = json.loads(event["heeded"])
        event = announcement(f"{request['kind']}.{_ENDS[event['end']]}", request["object"], request["tenant"])
    return announcement(event["type"], event["object"], event["tenant"])


def event_id(event_type: str, object_id: str) -> str:
    """Return the event's id, which is the same for repeated announcements so that receivers can ignore duplicates."""
    return "evt_" + hashlib.sha256(f"{event_type} {object_id}".encode()).hexdigest()[:32]

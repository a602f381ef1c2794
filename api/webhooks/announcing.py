"""Events are written down in the step that ends a thing; any gateway delivers them later (docs/adr/021-webhooks.md)."""

from __future__ import annotations

import hashlib
import json

from redis.asyncio import Redis

from cellama.tasks.contract.keys import heeded_key, job_key

BATCH_ENDS = ("completed", "failed", "expired", "cancelled")
EVENT_TYPES = (
    *(f"batch.{end}" for end in BATCH_ENDS),
    *(f"response.{end}" for end in ("completed", "failed", "cancelled", "incomplete")),
)
_ENDS = {  # of jobs, as the queue's scripts tell them → of responses
    "stop": "completed",
    "length": "incomplete",
    "timeout": "incomplete",
    "cancelled": "cancelled",
    "error": "failed",
}


def announcement(event_type: str, object_id: str, tenant: str | None) -> dict[str, str]:
    """Return the entry for the stream `webhook_events_key()` that the step which ends an object writes.

    The endpoints of the tenant get the event at least once. Announcing an object twice gives the same id. Raises
    ValueError.
    """
    if event_type not in EVENT_TYPES:
        raise ValueError(f"event {event_type!r} is not known; there are: {', '.join(EVENT_TYPES)}")
    return {"type": event_type, "object": object_id, "tenant": tenant or ""}


async def heed(redis: Redis, job_id: str, kind: str, object_id: str, tenant: str | None, ttl_s: int) -> None:
    """When the job ends, the worker that writes the end announces that of this object, in the same step.

    Called before the job is queued; of one that was queued before nothing changes. `kind` is what the type of the event
    begins with (`response`); `ttl_s` is longer than the job may take. The queue keeps the text and does not read it.
    Raises RedisError.
    """
    event = json.dumps({"kind": kind, "object": object_id, "tenant": tenant or ""})
    if not await redis.exists(job_key(job_id)):
        await redis.set(heeded_key(job_id), event, ex=ttl_s)


def announced(fields: dict[bytes, bytes]) -> dict[str, str]:
    """What an entry of the stream says: as `announcement`, or as a script of the queue wrote it. Raises ValueError."""
    event = {name.decode(): value.decode() for name, value in fields.items()}
    if "heeded" in event:
        heeded = json.loads(event["heeded"])
        event = announcement(f"{heeded['kind']}.{_ENDS[event['end']]}", heeded["object"], heeded["tenant"])
    return announcement(event["type"], event["object"], event["tenant"])


def event_id(event_type: str, object_id: str) -> str:
    """The same for the same, so that who hears of it twice can tell."""
    return "evt_" + hashlib.sha256(f"{event_type} {object_id}".encode()).hexdigest()[:32]

"""Events are written down in the step that ends a thing; any gateway delivers them later (docs/adr/021-webhooks.md)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from cellama.tasks.contract.keys import WEBHOOK_EVENTS_KEY, heeded_key

MOST_EVENTS = 100_000  # that wait while no gateway runs; beyond that the oldest go
EVENT_TYPES = (
    *(f"batch.{end}" for end in ("completed", "failed", "expired", "cancelled")),
    *(f"response.{end}" for end in ("completed", "failed", "cancelled", "incomplete")),
)
_ENDS = {"stop": "completed", "length": "incomplete", "timeout": "incomplete", "cancelled": "cancelled"}


def announce(redis: Any, event_type: str, object_id: str, tenant: str | None) -> Any:
    """The endpoints of the tenant will hear of this, at least once.

    `redis` is a pipeline, so that it holds exactly if the rest of the transaction does; of an asynchronous client the
    result must be awaited. Announcing the same twice has the same id.
    """
    return redis.xadd(
        WEBHOOK_EVENTS_KEY, announcement(event_type, object_id, tenant), maxlen=MOST_EVENTS, approximate=True
    )


def announcement(event_type: str, object_id: str, tenant: str | None) -> dict[str, str]:
    """The fields of the entry, for a script that writes the end itself:
    `redis.call('XADD', WEBHOOK_EVENTS_KEY, '*', …)`."""
    if event_type not in EVENT_TYPES:
        raise ValueError(f"event {event_type!r} is not known; there are: {', '.join(EVENT_TYPES)}")
    return {"type": event_type, "object": object_id, "tenant": tenant or ""}


def heed(redis: Any, job_id: str, kind: str, object_id: str, tenant: str | None, ttl_s: int) -> Any:
    """When the job ends, the worker that writes the end announces that of this object, in the same step.

    Called before the job is queued. `kind` is what the type of the event begins with (`response`); `ttl_s` is longer
    than the job may take. The queue keeps the text and does not read it.
    """
    told = json.dumps({"kind": kind, "object": object_id, "tenant": tenant or ""})
    return redis.set(heeded_key(job_id), told, ex=ttl_s)


def announced(fields: dict[bytes, bytes]) -> dict[str, str]:
    """What an entry of the stream says: as `announcement`, or as a script of the queue wrote it. Raises ValueError."""
    told = {name.decode(): value.decode() for name, value in fields.items()}
    if "heeded" in told:
        heeded, end = json.loads(told["heeded"]), json.loads(told["end"])
        name = "failed" if end["type"] == "error" else _ENDS[end["finish_reason"]]
        told = announcement(f"{heeded['kind']}.{name}", heeded["object"], heeded["tenant"])
    return announcement(told["type"], told["object"], told["tenant"])


def event_id(event_type: str, object_id: str) -> str:
    """The same for the same, so that who hears of it twice can tell."""
    return "evt_" + hashlib.sha256(f"{event_type} {object_id}".encode()).hexdigest()[:32]

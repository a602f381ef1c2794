"""Record webhook deliveries in Redis.

Each delivery is created from an announced event, leased by a gateway, and settled by the gateway that holds the lease.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from cellama.api.webhooks.announcing import announced, event_id
from cellama.api.webhooks.endpoints import Endpoint
from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import lua_source
from cellama.tasks.contract.keys import webhook_delivery_key, webhook_due_key, webhook_events_key

log = event_logger(__name__)

LIFE_S = 5 * 24 * 3600  # lifetime of a delivery, longer than the three days that all attempts take
MAX_EVENTS = 100  # turned into deliveries at once, which takes Redis some milliseconds
MAX_DUE_CHECKED = 1000  # deliveries per poll, so that endpoints at their limit do not hide others
SCRIPTS = ("spread", "take", "settle")


@dataclass(frozen=True, slots=True)
class Delivery:
    """The delivery of one event to one endpoint. `attempts` includes the current attempt."""

    id: str
    event_id: str
    type: str
    object_id: str
    endpoint_id: str
    created_at: int  # Unix seconds on Redis's clock
    attempts: int


class DeliveryLedger:
    """Creates, leases and settles deliveries. Every call can be repeated safely. All methods may raise RedisError."""

    def __init__(self, redis: Redis, token: str) -> None:
        """Create the ledger. `token` identifies this gateway in leases."""
        self._redis = redis
        self._token = token
        self._scripts = {name: redis.register_script(lua_source(__package__, name)) for name in SCRIPTS}

    async def announced(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return the announced events that have not yet become deliveries, oldest first."""
        found: Any = await self._redis.xrange(webhook_events_key(), count=MAX_EVENTS)
        return list(found)

    async def spread(self, entry_id: bytes, fields: dict[bytes, bytes], endpoints: Sequence[Endpoint]) -> None:
        """Replace an announced event with one delivery for each subscribed endpoint."""
        try:
            event = announced(fields)
        except (ValueError, KeyError, TypeError) as error:  # written by another version
            log.error("webhook event dropped", key=webhook_events_key(), detail=f"the event can't be read: {error!r}")
            await self._redis.xdel(webhook_events_key(), entry_id)
            return
        kind, object_id = event["type"], event["object"]
        message_id = event_id(kind, object_id)
        recipients = [endpoint.id for endpoint in endpoints if endpoint.subscribes_to(kind, event["tenant"])]
        pairs = [part for endpoint in recipients for part in (f"{message_id}:{endpoint}", endpoint)]
        await self._scripts["spread"](
            keys=[webhook_events_key(), webhook_due_key()],
            args=[entry_id, webhook_delivery_key(""), LIFE_S, message_id, kind, object_id, *pairs],
        )

    async def take(
        self, max_num: int, max_per_endpoint: int, lease_s: float, num_to: Mapping[str, int] | None = None
    ) -> list[Delivery]:
        """Take up to `max_num` due deliveries, which no other gateway can take until the lease expires.

        `num_to` maps endpoints to the number of attempts in progress in this gateway. Including the newly taken
        deliveries, no endpoint has more than `max_per_endpoint` attempts in progress.
        """
        in_progress = [part for pair in (num_to or {}).items() for part in pair]
        taken = await self._scripts["take"](
            keys=[webhook_due_key()],
            args=[
                webhook_delivery_key(""),
                max_num,
                lease_s,
                self._token,
                MAX_DUE_CHECKED,
                max_per_endpoint,
                *in_progress,
            ],
        )
        return [_delivery(delivery_id.decode(), fields) for delivery_id, fields in taken]

    async def settle(self, delivery: Delivery, retry_in_s: float | None = None) -> bool:
        """End a delivery or schedule its next attempt.

        Return False if another gateway now holds the delivery's lease.
        """
        wait = "" if retry_in_s is None else f"{retry_in_s:.3f}"
        keys = [webhook_due_key(), webhook_delivery_key(delivery.id)]
        return bool(await self._scripts["settle"](keys=keys, args=[delivery.id, self._token, wait]))


def _delivery(delivery_id: str, fields: list[bytes]) -> Delivery:
    values = {name.decode(): value.decode() for name, value in zip(fields[::2], fields[1::2], strict=True)}
    return Delivery(
        id=delivery_id,
        event_id=values["event"],
        type=values["type"],
        object_id=values["object"],
        endpoint_id=values["endpoint"],
        created_at=int(values["created_at"]),
        attempts=int(values["attempts"]),
    )

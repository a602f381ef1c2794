"""Deliveries in Redis: made of what was announced, taken under a lease, settled by whoever holds it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from cellama.api.webhooks.announcing import announced, event_id
from cellama.api.webhooks.endpoints import Endpoint
from cellama.tasks.connection.redis_clock import lua_source
from cellama.tasks.contract.keys import webhook_delivery_key, webhook_due_key, webhook_events_key

log = logging.getLogger(__name__)

KEPT_S = 5 * 24 * 3600  # of a delivery: all attempts take three days
MOST_EVENTS = 100  # spread at once: some milliseconds of Redis
MOST_LOOKED_AT = 1000  # of those that are due, so endpoints with full places do not hide others
SCRIPTS = ("spread", "take", "settle")


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event on its way to one endpoint; `attempts` counts this one."""

    id: str
    event_id: str
    type: str
    object_id: str
    endpoint_id: str
    created_at: int  # unix s, by Redis' clock
    attempts: int


class DeliveryLedger:
    """Methods raise RedisError. Each may be done twice."""

    def __init__(self, redis: Redis, token: str) -> None:
        """`token` names this gateway."""
        self._redis = redis
        self._token = token
        self._scripts = {name: redis.register_script(lua_source(__package__, name)) for name in SCRIPTS}

    async def announced(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """What was announced and not spread yet, the oldest first."""
        found: Any = await self._redis.xrange(webhook_events_key(), count=MOST_EVENTS)
        return list(found)

    async def spread(self, entry_id: bytes, fields: dict[bytes, bytes], endpoints: Sequence[Endpoint]) -> None:
        """Each endpoint that wants the event gets a delivery, and the entry is gone."""
        try:
            event = announced(fields)
        except (ValueError, KeyError, TypeError) as error:  # of another version
            log.error("an entry of %s can't be read and is left out: %r", webhook_events_key(), error)
            await self._redis.xdel(webhook_events_key(), entry_id)
            return
        kind, object_id, own_id = event["type"], event["object"], event_id(event["type"], event["object"])
        wanting = [endpoint.id for endpoint in endpoints if endpoint.wants(kind, event["tenant"])]
        pairs = [part for endpoint in wanting for part in (f"{own_id}:{endpoint}", endpoint)]
        await self._scripts["spread"](
            keys=[webhook_events_key(), webhook_due_key()],
            args=[entry_id, webhook_delivery_key(""), KEPT_S, own_id, kind, object_id, *pairs],
        )

    async def take(
        self, most: int, most_to_one: int, lease_s: float, num_to: Mapping[str, int] | None = None
    ) -> list[Delivery]:
        """At most so many that are due, for this gateway alone while the lease lasts. `num_to` says how many attempts
        are under way to endpoints already, each of which gets at most `most_to_one` at once."""
        under_way = [part for pair in (num_to or {}).items() for part in pair]
        taken = await self._scripts["take"](
            keys=[webhook_due_key()],
            args=[webhook_delivery_key(""), most, lease_s, self._token, MOST_LOOKED_AT, most_to_one, *under_way],
        )
        return [_delivery(delivery_id.decode(), fields) for delivery_id, fields in taken]

    async def settle(self, delivery: Delivery, again_in_s: float | None = None) -> bool:
        """It is over, or tried again later. False if its lease has ended and another gateway has it."""
        again = "" if again_in_s is None else f"{again_in_s:.3f}"
        keys = [webhook_due_key(), webhook_delivery_key(delivery.id)]
        return bool(await self._scripts["settle"](keys=keys, args=[delivery.id, self._token, again]))


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

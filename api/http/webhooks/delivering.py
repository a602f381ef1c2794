"""A gateway's part of all deliveries: it looks for what is due, and makes attempts, a bounded number at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import uuid
from collections import Counter

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cellama.api.http.background import LookLoop
from cellama.api.webhooks.endpoints import EndpointStore
from cellama.config import Settings
from cellama.tasks.connection.connections import connect_async

from .ledger import Delivery, DeliveryLedger
from .sending import DeliveryOutcome, Sender

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # for a reply of Redis, far shorter than a lease
AT_ONCE = 16  # attempts: each holds a connection, and most endpoints answer within a second
AT_ONCE_TO_ONE = 4  # attempts to one endpoint: an endpoint that is slow delays no other one
AGAIN_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)  # after each attempt that failed
SPREAD_OF_WAITS = 0.1  # a wait is up to a tenth longer, so deliveries that failed together do not come together
LEASE_BEYOND_S = 30.0  # of a lease beyond the attempt: for the calls of Redis before and after it


class Webhooks:
    """Delivers from `start` on until it is closed, in one event loop. Any number of gateways may."""

    def __init__(self, redis: Redis, sender: Sender, timeout_s: float) -> None:
        """`timeout_s` bounds an attempt of the sender; the client of Redis is closed with this."""
        self._redis = redis
        self._sender = sender
        self._lease_s = timeout_s + LEASE_BEYOND_S
        self._ledger = DeliveryLedger(redis, uuid.uuid4().hex)
        self._endpoints = EndpointStore(redis)
        self._attempts: set[asyncio.Task[None]] = set()
        self._num_to: Counter[str] = Counter()
        self._loop = LookLoop("webhooks", self.look)

    def start(self) -> None:
        """Start to deliver; within the event loop. Further calls change nothing."""
        self._loop.start()

    async def close(self) -> None:
        """Attempts are cut off: another gateway makes them again when their lease is over."""
        await self._loop.close()
        for attempt in self._attempts:
            attempt.cancel()
        await self.ended()
        await self._sender.close()
        await self._redis.aclose()

    async def look(self) -> bool:
        """Spreads what was announced, and begins as many attempts as it may. False if there was nothing to do. Raises
        RedisError."""
        announced = await self._ledger.announced()
        endpoints = await self._endpoints.all() if announced else []
        for entry_id, fields in announced:
            await self._ledger.spread(entry_id, fields, endpoints)
        free = AT_ONCE - len(self._attempts)
        if free <= 0:
            return bool(announced)
        taken = await self._ledger.take(free, AT_ONCE_TO_ONE, self._lease_s, self._num_to)
        for delivery in taken:
            self._num_to[delivery.endpoint_id] += 1
            attempt = asyncio.create_task(self._attempt(delivery))
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempts.discard)
        return bool(announced or taken)

    async def ended(self) -> None:
        """Returns when no attempt is under way."""
        while self._attempts:
            await asyncio.wait(self._attempts)

    async def _attempt(self, delivery: Delivery) -> None:
        try:
            with contextlib.suppress(RedisError):  # it is tried again when the lease is over
                await self._deliver(delivery)
        except Exception:
            log.exception("webhook %s was not delivered this time", delivery.id)
        finally:
            self._num_to[delivery.endpoint_id] -= 1
            self._num_to += Counter()  # without those that are at 0

    async def _deliver(self, delivery: Delivery) -> None:
        endpoint = await self._endpoints.find(delivery.endpoint_id)
        if endpoint is None or endpoint.state == "off":
            await self._ledger.settle(delivery)
            return
        outcome = await self._sender.send(delivery, endpoint)
        if outcome.is_gone:
            log.warning("endpoint %s answers 410, so it hears of nothing more", endpoint.id)
            await self._endpoints.turn_off(endpoint)
        again_in_s = None if outcome.is_gone else wait_after(delivery.attempts, outcome)
        if not outcome.is_taken and not outcome.is_gone:
            then = "it was the last attempt" if again_in_s is None else f"again in {again_in_s:.0f} s"
            log.warning("webhook %s, attempt %d: %s; %s", delivery.id, delivery.attempts, outcome.why, then)
        await self._ledger.settle(delivery, again_in_s)


def wait_after(num_attempts: int, outcome: DeliveryOutcome) -> float | None:
    """Seconds until the next attempt; None: there is none."""
    if outcome.is_taken or num_attempts > len(AGAIN_S):
        return None
    wait_s = AGAIN_S[num_attempts - 1] * random.uniform(1, 1 + SPREAD_OF_WAITS)
    return max(wait_s, outcome.retry_after_s)


def webhooks_of(settings: Settings) -> Webhooks:
    """Those of the Redis of the settings."""
    timeout_s = settings.gateway_webhook_timeout_s
    sender = Sender(timeout_s, private=settings.gateway_webhook_private)
    redis = connect_async(settings.redis_url, socket_connect_timeout=ANSWER_S, socket_timeout=ANSWER_S)
    return Webhooks(redis, sender, timeout_s)

"""The gateway's delivery loop, which polls for due deliveries and makes a limited number of concurrent attempts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections import Counter

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cellama.api.http.background import PollLoop
from cellama.api.webhooks.endpoints import EndpointStore
from cellama.config import Settings
from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import connect_async

from .ledger import Delivery, DeliveryLedger
from .sending import DeliveryOutcome, Sender

log = event_logger(__name__)

ANSWER_S = 5.0  # timeout for a reply of Redis, far shorter than a lease
MAX_ATTEMPTS = 16  # at the same time: each holds a connection, and most endpoints answer within a second
MAX_ATTEMPTS_PER_ENDPOINT = 4  # at the same time, so that a slow endpoint does not delay others
RETRY_WAITS_S = (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400)  # after each failed attempt
JITTER = 0.1  # a wait is up to a tenth longer, so that deliveries that failed together are not retried together
LEASE_MARGIN_S = 30.0  # a lease lasts this much longer than an attempt, for the calls of Redis before and after it


class Webhooks:
    """Delivers webhooks from `start` to `close`, in one event loop. Any number of gateways may share the work."""

    def __init__(self, redis: Redis, sender: Sender, timeout_s: float) -> None:
        """Create the loop without starting it. `timeout_s` limits each attempt. `close` also closes `redis`."""
        self._redis = redis
        self._sender = sender
        self._lease_s = timeout_s + LEASE_MARGIN_S
        self._ledger = DeliveryLedger(redis, uuid.uuid4().hex)
        self._endpoints = EndpointStore(redis)
        self._attempts: set[asyncio.Task[None]] = set()
        self._num_to: Counter[str] = Counter()
        self._loop = PollLoop("webhooks", self.poll)

    def start(self) -> None:
        """Start delivering in the running event loop. Further calls have no effect."""
        self._loop.start()

    async def close(self) -> None:
        """Stop delivering.

        Attempts in progress are cancelled, and another gateway repeats them when their leases expire.
        """
        await self._loop.close()
        for attempt in self._attempts:
            attempt.cancel()
        await self.wait_for_attempts()
        await self._sender.close()
        await self._redis.aclose()

    async def poll(self) -> bool:
        """Turn announced events into deliveries, and start as many attempts as allowed.

        Return False if no work was found. Raises RedisError.
        """
        announced = await self._ledger.announced()
        endpoints = await self._endpoints.all() if announced else []
        for entry_id, fields in announced:
            await self._ledger.spread(entry_id, fields, endpoints)
        free = MAX_ATTEMPTS - len(self._attempts)
        if free <= 0:
            return bool(announced)
        taken = await self._ledger.take(free, MAX_ATTEMPTS_PER_ENDPOINT, self._lease_s, self._num_to)
        for delivery in taken:
            self._num_to[delivery.endpoint_id] += 1
            attempt = asyncio.create_task(self._attempt(delivery))
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempts.discard)
        return bool(announced or taken)

    async def wait_for_attempts(self) -> None:
        """Wait until no attempts are in progress."""
        while self._attempts:
            await asyncio.wait(self._attempts)

    async def _attempt(self, delivery: Delivery) -> None:
        try:
            with contextlib.suppress(RedisError):  # it is retried when the lease expires
                await self._deliver(delivery)
        except Exception:
            log.exception(
                "webhook delivery attempt failed",
                delivery=delivery.id,
                detail="unexpected error; the delivery will be retried",
            )
        finally:
            self._num_to[delivery.endpoint_id] -= 1
            self._num_to += Counter()  # removes the endpoints whose count is 0

    async def _deliver(self, delivery: Delivery) -> None:
        endpoint = await self._endpoints.find(delivery.endpoint_id)
        if endpoint is None or endpoint.state == "off":
            await self._ledger.settle(delivery)
            return
        outcome = await self._sender.send(delivery, endpoint)
        if outcome.is_gone:
            log.warning(
                "webhook endpoint disabled",
                endpoint=endpoint.id,
                status=410,
                detail="the endpoint will receive no more events",
            )
            await self._endpoints.disable(endpoint)
        retry_in_s = None if outcome.is_gone else wait_after(delivery.attempts, outcome)
        if not outcome.is_delivered and not outcome.is_gone:
            then = "this was the last attempt" if retry_in_s is None else f"retrying in {retry_in_s:.0f} s"
            log.warning(
                "webhook delivery attempt failed",
                delivery=delivery.id,
                attempt=delivery.attempts,
                detail=f"{outcome.reason}; {then}",
            )
        await self._ledger.settle(delivery, retry_in_s)


def wait_after(num_attempts: int, outcome: DeliveryOutcome) -> float | None:
    """Return the number of seconds until the next attempt, or None after the last attempt."""
    if outcome.is_delivered or num_attempts > len(RETRY_WAITS_S):
        return None
    wait_s = RETRY_WAITS_S[num_attempts - 1] * random.uniform(1, 1 + JITTER)
    return max(wait_s, outcome.retry_after_s)


def webhooks_of(settings: Settings) -> Webhooks:
    """Return a delivery loop for the configured Redis."""
    timeout_s = settings.gateway_webhook_timeout_s
    sender = Sender(timeout_s, private=settings.gateway_webhook_private)
    redis = connect_async(settings.redis_url, socket_connect_timeout=ANSWER_S, socket_timeout=ANSWER_S)
    return Webhooks(redis, sender, timeout_s)

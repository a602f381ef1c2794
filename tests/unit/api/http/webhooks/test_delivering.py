"""Test that announced events reach their endpoints at least once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openai import OpenAI
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from cellama.api.http.webhooks.delivering import (
    LEASE_MARGIN_S,
    MAX_ATTEMPTS_PER_ENDPOINT,
    RETRY_WAITS_S,
    Webhooks,
    wait_after,
)
from cellama.api.http.webhooks.ledger import DeliveryLedger
from cellama.api.http.webhooks.sending import DeliveryOutcome, Sender
from cellama.api.webhooks import announcement
from cellama.api.webhooks.endpoints import Endpoint, EndpointStore, new_id, new_secret
from cellama.tasks.contract.keys import webhook_delivery_key, webhook_due_key, webhook_events_key, webhooks_key

from .....receivers import Receiver


def register(redis: Redis, url: str, **fields: Any) -> Endpoint:
    endpoint = Endpoint.model_validate({"id": new_id(), "url": url, "secret": new_secret(), **fields})
    redis.hset(webhooks_key(), endpoint.id, endpoint.model_dump_json(exclude_none=True))
    return endpoint


def announce(redis: Any, event_type: str, object_id: str) -> Any:
    return redis.xadd(webhook_events_key(), announcement(event_type, object_id, None))


def with_webhooks(url: str, do: Callable[[Webhooks], Awaitable[Any]], *, private: bool = True) -> Any:
    async def run() -> Any:
        webhooks = Webhooks(AsyncRedis.from_url(url), Sender(10, private=private), 10)
        try:
            return await do(webhooks)
        finally:
            await webhooks.close()

    return asyncio.run(run())


async def once(webhooks: Webhooks) -> None:
    await webhooks.poll()
    await webhooks.wait_for_attempts()


def make_due(redis: Redis) -> None:
    for delivery in redis.zrange(webhook_due_key(), 0, -1):
        redis.zadd(webhook_due_key(), {delivery: 0})


def pending_keys(redis: Redis) -> list[str]:
    """Return the keys of pending deliveries."""
    return [key.decode() for key in redis.keys("cellama:webhook:*") if redis.type(key) != b"stream"]


def test_event_is_delivered_with_signature(redis_url: str, receiver: Receiver) -> None:
    with Redis.from_url(redis_url) as redis:
        endpoint = register(redis, receiver.url)
        register(redis, receiver.url, tenant="other")
        entry_id = announce(redis, "batch.completed", "batch_1")
        with_webhooks(redis_url, once)
        [(path, headers, body)] = receiver.calls
        event = OpenAI(api_key="none").webhooks.unwrap(body, headers, secret=endpoint.secret)
        assert (path, event.type, event.data.id, event.id) == (
            "/hook?a=1", "batch.completed", "batch_1", headers["webhook-id"]
        )  # fmt: skip
        assert event.created_at == int(entry_id.split(b"-")[0]) // 1000
        assert headers["host"] == receiver.url.split("/")[2]
        assert not pending_keys(redis)
        assert redis.xlen(webhook_events_key()) == 0


def test_unknown_event_type_is_not_announced() -> None:
    with pytest.raises(ValueError, match="is unknown"):
        announcement("batch.begun", "batch_1", None)


@pytest.mark.parametrize("answer", [(500, {}), (302, {"location": "http://127.0.0.1:1/"}), (404, {})])
def test_failed_delivery_is_retried_with_the_same_id(
    redis_url: str, receiver: Receiver, answer: tuple[int, dict[str, str]]
) -> None:
    receiver.answers = [answer, (204, {})]
    with Redis.from_url(redis_url) as redis:
        register(redis, receiver.url)
        announce(redis, "response.completed", "resp_1")
        before = time.time()
        with_webhooks(redis_url, once)
        [(delivery, due_at)] = redis.zrange(webhook_due_key(), 0, -1, withscores=True)
        assert before + RETRY_WAITS_S[0] <= due_at <= time.time() + RETRY_WAITS_S[0] * 1.1
        redis.zadd(webhook_due_key(), {delivery: due_at + 1000})  # not due during the rest of the test
        with_webhooks(redis_url, once)
        assert len(receiver.calls) == 1
        make_due(redis)
        with_webhooks(redis_url, once)
        assert [headers["webhook-id"] for _, headers, _ in receiver.calls] == [receiver.calls[0][1]["webhook-id"]] * 2
        assert receiver.calls[0][2] == receiver.calls[1][2]
        assert not pending_keys(redis)


def test_delivery_is_taken_over_when_its_gateway_dies(redis_url: str, receiver: Receiver) -> None:
    with Redis.from_url(redis_url) as redis:
        register(redis, receiver.url)
        announce(redis, "batch.expired", "batch_1")

        async def take_and_die(webhooks: Webhooks) -> None:
            await webhooks.poll()  # close() cancels the attempt

        with_webhooks(redis_url, take_and_die)
        [(delivery, ends_at)] = redis.zrange(webhook_due_key(), 0, -1, withscores=True)
        assert ends_at > time.time() + LEASE_MARGIN_S / 2
        redis.zadd(webhook_due_key(), {delivery: 0})
        with_webhooks(redis_url, once)
        assert not pending_keys(redis)
        assert receiver.calls


def test_settling_a_delivery_has_no_effect_when_its_lease_is_lost(redis_url: str) -> None:
    async def run() -> list[bool]:
        async with AsyncRedis.from_url(redis_url) as redis:
            one, other = DeliveryLedger(redis, "one"), DeliveryLedger(redis, "other")
            endpoint = Endpoint(id=new_id(), url="https://example.org", secret=new_secret())
            await EndpointStore(redis).write(endpoint)
            await announce(redis, "batch.failed", "batch_1")
            [(entry_id, fields)] = await one.announced()
            await one.spread(entry_id, fields, [endpoint])
            await other.spread(entry_id, fields, [endpoint])  # no effect, because the entry was deleted
            [first] = await one.take(9, 9, lease_s=-1)
            [second] = await other.take(9, 9, lease_s=60)
            assert second.attempts == first.attempts + 1
            return [await one.settle(first), await other.settle(second)]

    assert asyncio.run(run()) == [False, True]


def test_attempts_per_endpoint_are_limited(redis_url: str) -> None:
    async def run() -> list[int]:
        async with AsyncRedis.from_url(redis_url) as redis:
            ledger = DeliveryLedger(redis, "one")
            busy, idle = (Endpoint(id=new_id(), url="https://example.org", secret=new_secret()) for _ in range(2))
            for place in range(MAX_ATTEMPTS_PER_ENDPOINT + 3):
                await announce(redis, "batch.failed", f"batch_{place}")
            for entry_id, fields in await ledger.announced():
                await ledger.spread(entry_id, fields, [busy])
            await announce(redis, "batch.failed", "batch_last")
            for entry_id, fields in await ledger.announced():
                await ledger.spread(entry_id, fields, [busy, idle])
            taken = await ledger.take(99, MAX_ATTEMPTS_PER_ENDPOINT, 60, {busy.id: 1})
            return [sum(one.endpoint_id == endpoint.id for one in taken) for endpoint in (busy, idle)]

    assert asyncio.run(run()) == [MAX_ATTEMPTS_PER_ENDPOINT - 1, 1]


def test_private_address_receives_no_events_unless_allowed(redis_url: str, receiver: Receiver) -> None:
    with Redis.from_url(redis_url) as redis:
        register(redis, receiver.url)
        announce(redis, "batch.completed", "batch_1")
        with_webhooks(redis_url, once, private=False)
        assert not receiver.calls
        assert pending_keys(redis)


def test_endpoint_is_disabled_when_it_returns_410(redis_url: str, receiver: Receiver) -> None:
    receiver.answers = [(410, {})]
    with Redis.from_url(redis_url) as redis:
        endpoint = register(redis, receiver.url)
        for number in range(2):
            announce(redis, "batch.completed", f"batch_{number}")
            with_webhooks(redis_url, once)
        assert len(receiver.calls) == 1
        assert json.loads(redis.hget(webhooks_key(), endpoint.id) or "")["state"] == "off"
        assert not pending_keys(redis)


def test_unreadable_stream_entry_does_not_block_other_entries(redis_url: str, receiver: Receiver) -> None:
    with Redis.from_url(redis_url) as redis:
        register(redis, receiver.url)
        for fields in ({"x": "y"}, {"heeded": "no JSON", "end": "stop"}, {"heeded": "{}", "end": "?"}):
            redis.xadd(webhook_events_key(), fields)
        announce(redis, "batch.completed", "batch_1")
        with_webhooks(redis_url, once)
        assert len(receiver.calls) == 1
        assert redis.xlen(webhook_events_key()) == 0


def test_deleted_endpoint_is_not_restored_by_a_late_410_answer(redis_url: str) -> None:
    async def run() -> list[Endpoint]:
        async with AsyncRedis.from_url(redis_url) as redis:
            store = EndpointStore(redis)
            endpoint = Endpoint(id=new_id(), url="https://example.org", secret=new_secret())
            await store.disable(endpoint)
            return await store.all()

    assert asyncio.run(run()) == []


def test_delivery_is_dropped_when_endpoint_is_deleted(redis_url: str, receiver: Receiver) -> None:
    receiver.answers = [(500, {})]
    with Redis.from_url(redis_url) as redis:
        register(redis, receiver.url)
        announce(redis, "batch.completed", "batch_1")
        with_webhooks(redis_url, once)
        redis.delete(webhooks_key())
        make_due(redis)
        assert redis.keys(webhook_delivery_key("*"))
        with_webhooks(redis_url, once)
        assert not pending_keys(redis)


def test_delays_between_attempts_grow_until_the_last_attempt() -> None:
    failed = DeliveryOutcome(500)
    waits = [wait_after(attempt, failed) for attempt in range(1, len(RETRY_WAITS_S) + 2)]
    assert waits[-1] is None
    for wait_s, min_wait_s in zip(waits, RETRY_WAITS_S, strict=False):
        assert min_wait_s <= (wait_s or 0) <= min_wait_s * 1.1
    assert wait_after(1, DeliveryOutcome(429, retry_after_s=100)) == 100
    assert wait_after(1, DeliveryOutcome(204)) is None

"""Test the records of batches: allowed changes of status, and changes under a lease."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from cellama.api.http.auth import Caller
from cellama.api.http.batches.leases import GatewayLease
from cellama.api.http.batches.service import BatchOrder, BatchService
from cellama.api.http.errors import ApiError
from cellama.api.http.parsing import PageQuery
from cellama.api.webhooks.announcing import announced, announcement
from cellama.config import Settings
from cellama.tasks.contract.keys import webhook_events_key

from ..conftest import Run

ACME, OTHER = Caller("acme"), Caller("other")
ORDER = BatchOrder("file-1", "/v1/embeddings", "24h", 86_400, {"a": "b"}, 3600)


def service_of(redis: Redis, **settings: Any) -> BatchService:
    return BatchService(Settings(**settings), redis)


def test_view_has_the_format_that_openai_client_expects(run: Run) -> None:
    from openai.types import Batch

    async def scenario(redis: Redis) -> Any:
        batches = service_of(redis)
        return await batches.view(await batches.create(ORDER, ACME, None))

    batch = Batch.model_validate(run(scenario))
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", "/v1/embeddings", {"a": "b"})
    assert batch.expires_at == batch.created_at + 86_400
    assert batch.request_counts is not None
    assert batch.request_counts.total == 0


def test_create_returns_same_batch_for_idempotency_key_but_409_for_different_body(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        batches = service_of(redis)
        first = await batches.create(ORDER, ACME, '["acme", "k"]')
        assert (await batches.create(ORDER, ACME, '["acme", "k"]'))["id"] == first["id"]
        changed = BatchOrder("file-2", "/v1/embeddings", "24h", 86_400, None, 3600)
        with pytest.raises(ApiError) as raised:
            await batches.create(changed, ACME, '["acme", "k"]')
        assert raised.value.status == 409
        assert len(await batches.open_batches()) == 1

    run(scenario)


def test_create_returns_429_when_tenant_has_too_many_open_batches(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        batches = service_of(redis, gateway_open_batches=1)
        first = await batches.create(ORDER, ACME, None)
        with pytest.raises(ApiError) as raised:
            await batches.create(ORDER, ACME, None)
        assert (raised.value.status, raised.value.code) == (429, "too_many_batches")
        await batches.create(ORDER, OTHER, None)
        await batches.close(first["id"], "acme")
        await batches.create(ORDER, ACME, None)

    run(scenario)


def test_only_one_of_cancellation_and_completion_takes_effect_when_both_coincide(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        batches = service_of(redis)
        record = await batches.create(ORDER, ACME, None)
        with pytest.raises(ApiError, match="404"):
            await batches.cancel(record["id"], OTHER)
        assert (await batches.cancel(record["id"], ACME))["status"] == "cancelling"
        assert (await batches.cancel(record["id"], ACME))["status"] == "cancelling"
        assert await batches.move(record, "in_progress", expected=("validating",)) == (False, "cancelling")
        ended = await batches.create(ORDER, ACME, None)
        assert await batches.move(ended, "failed", expected=("validating",)) == (True, "failed")
        with pytest.raises(ApiError) as raised:
            await batches.cancel(ended["id"], ACME)
        assert (raised.value.status, raised.value.headers["x-should-retry"]) == (409, "false")

    run(scenario)


def test_batch_is_announced_only_when_it_ends(run: Run) -> None:
    async def scenario(redis: Redis) -> list[Any]:
        batches = service_of(redis)
        record = await batches.create(ORDER, ACME, None)
        await batches.cancel(record["id"], ACME)
        for of in (("in_progress",), ("cancelling",), ("cancelling",)):
            await batches.move(record, "cancelled", expected=of)
        return [announced(fields) for _, fields in await redis.xrange(webhook_events_key())] + [record["id"]]

    received, batch_id = run(scenario)
    assert received == announcement("batch.cancelled", batch_id, "acme")


def test_change_has_no_effect_when_another_driver_holds_the_lease(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        batches = service_of(redis)
        record = await batches.create(ORDER, ACME, None)
        first, second = (GatewayLease(redis, record["id"], 30.0) for _ in range(2))
        assert await first.take()
        await redis.delete(f"cellama:http:lease:{record['id']}")
        assert await second.take()
        done = await batches.move(record, "in_progress", expected=("validating",), lease_token=first.token)
        assert done == (False, "validating")
        done = await batches.move(record, "in_progress", expected=("validating",), lease_token=second.token, total=3)
        assert done == (True, "in_progress")

    run(scenario)


def test_pages_are_contiguous_and_contain_only_records_of_the_tenant(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        batches = service_of(redis)
        made = {(await batches.create(ORDER, ACME, None))["id"] for _ in range(5)}
        other = await batches.create(ORDER, OTHER, None)
        seen, after = [], None
        for _ in range(3):
            query = PageQuery(after, 2, "desc")
            page = query.to_list(await batches.records.page(ACME, query))
            seen += [record["id"] for record in page["data"]]
            after = page["last_id"]
        assert (set(seen), len(seen), page["has_more"]) == (made, 5, False)
        upwards = await batches.records.page(ACME, PageQuery(None, 9, "asc"))
        assert [record["id"] for record in upwards] == seen[::-1]
        with pytest.raises(ApiError, match="404"):
            await batches.records.page(ACME, PageQuery(other["id"], 2, "desc"))

    run(scenario)

"""The asyncio client behaves like the blocking client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis import Redis

from cellama.api import AsyncClient
from cellama.tasks.contract.errors import InvalidJob, JobCancelled, JobTimeout, UnknownModel

from ..conftest import PATIENCE_S, WorkerProcess
from .conftest import GREEDY, LONG

HEAD = "The little fox lived in a green forest, and every day it went to the river to talk to the frogs. " * 3
pytestmark = pytest.mark.usefixtures("worker")


def with_client(body: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncClient() as client:
            await body(client)

    asyncio.run(run())


def test_async_client_streams_and_returns_the_same_text() -> None:
    async def body(client: AsyncClient) -> None:
        job = await client.generate("tiny", "Once upon a time", max_tokens=30, **GREEDY)
        events = [event async for event in job.stream(timeout=PATIENCE_S)]
        result = await job.result(timeout=PATIENCE_S)
        assert "".join(e.get("text", "") for e in events) == result["text"]
        assert [e["seq"] for e in events] == list(range(len(events)))
        assert [e async for e in client.stream(job.id, after=5)] == events[6:]

    with_client(body)


def test_async_client_reads_a_finished_result_without_subscribing(redis_client: Redis) -> None:
    async def body(client: AsyncClient) -> None:
        job = await client.generate("tiny", "Once upon a time", max_tokens=3, **GREEDY)
        await job.result(timeout=PATIENCE_S)
        before = num_subscriptions(redis_client)
        assert (await job.result(timeout=PATIENCE_S))["finish_reason"] == "length"
        assert num_subscriptions(redis_client) == before

    with_client(body)


def num_subscriptions(redis: Redis) -> int:
    """Return how many subscriptions Redis has received so far."""
    return int(redis.info("commandstats")["cmdstat_subscribe"]["calls"])


def test_async_client_serves_many_jobs_concurrently() -> None:
    async def body(client: AsyncClient) -> None:
        async def ask(question: str) -> dict[str, Any]:
            job = await client.chat("tiny", [{"role": "user", "content": question}], **GREEDY)
            return await job.result(timeout=PATIENCE_S)

        results = await asyncio.gather(*(ask(f"What is {i} + 1?") for i in range(12)))
        assert all(result["finish_reason"] == "stop" for result in results)
        embedded = await (await client.embed("tiny", ["a", "b"])).result(timeout=PATIENCE_S)
        assert len(embedded["embeddings"]) == 2
        assert "tiny" in [m["id"] for m in await client.models()]
        assert (await client.stats())["workers"] >= 1  # a worker that another module has killed counts for a while

    with_client(body)


def test_async_client_supports_prefill_parent_keys_and_cache_queries() -> None:
    async def body(client: AsyncClient) -> None:
        given: dict[str, Any] = {"cache_scope": "async", **GREEDY}
        read = await (await client.prefill("tiny", HEAD, cache_scope="async")).result(timeout=PATIENCE_S)
        num_read = read["usage"]["prompt_tokens"]
        (prefix,) = await client.cached_prefix("tiny", HEAD, cache_scope="async")
        assert (prefix["cached_tokens"] >= num_read - 2, prefix["tier"]) == (True, "device")
        job = await client.generate("tiny", " Then", parent_key=read["finish_key"], max_tokens=3, **given)
        usage = (await job.result(timeout=PATIENCE_S))["usage"]
        assert usage["cached_tokens"] >= num_read - 1
        hits, workers = await client.last_cache_hit("tiny"), await client.workers()
        assert set() < hits.keys() <= {worker.name for worker in workers}  # a killed worker is still listed for a while

    with_client(body)


def test_async_client_supports_hundreds_of_concurrent_readers(worker: WorkerProcess) -> None:
    async def body(client: AsyncClient) -> None:
        job = await client.generate("tiny", "Once upon a time", **LONG)
        readers = [job.stream(timeout=PATIENCE_S) for _ in range(150)]
        firsts = await asyncio.gather(*(anext(reader) for reader in readers))  # none of the jobs has ended
        assert {event["seq"] for event in firsts} == {0}
        await job.cancel()
        for reader in readers:
            await reader.aclose()

    with worker.slowed():
        with_client(body)


def test_async_client_raises_different_errors_for_cancellation_and_timeout(worker: WorkerProcess) -> None:
    async def body(client: AsyncClient) -> None:
        job = await client.generate("tiny", "Once upon a time", **LONG)
        with pytest.raises(JobTimeout, match="but continues"):
            await job.result(timeout=0.05)
        await job.cancel()
        with pytest.raises(JobCancelled):
            await job.result(timeout=PATIENCE_S)

    with worker.slowed():
        with_client(body)


def test_async_client_rejects_bad_input_immediately() -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(InvalidJob, match="max_tokens is 0"):
            await client.generate("tiny", "Hi", max_tokens=0)
        with pytest.raises(UnknownModel, match="did you mean 'tiny'"):
            await client.chat("tinny", [{"role": "user", "content": "Hi"}])

    with_client(body)


def test_job_is_cancelled_when_its_readers_scope_is_cancelled_repeatedly() -> None:
    """Web frameworks on anyio cancel every await, including those of the cleanup, when their client disconnects."""

    async def body(client: AsyncClient) -> None:
        async def read(job_id: str) -> None:
            async for _ in client.stream(job_id, cancel_on_exit=True, ping=0.01):
                reading.set()

        job, reading = await client.generate("nobody-serves-this", "Hi", wait=True), asyncio.Event()
        reader = asyncio.create_task(read(job.id))
        await asyncio.wait_for(reading.wait(), PATIENCE_S)
        while not reader.done():
            reader.cancel()
            await asyncio.sleep(0)
        with pytest.raises(JobCancelled):
            await job.result(timeout=PATIENCE_S)

    with_client(body)

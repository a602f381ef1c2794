"""Test the charge for a request after a disconnect, and the answer to a repeated request.

The tests use a Redis without a worker.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from redis import Redis
from starlette.requests import Request

from cellama.api.http.auth import Caller, NoKeys
from cellama.api.http.context import RequestContext
from cellama.api.http.gateway import Gateway
from cellama.api.http.parsing import ParsedRequest
from cellama.api.http.running import RunningJobs
from cellama.api.machine.redis_server import RedisServer
from cellama.config import get_settings
from cellama.tasks.contract.keys import events_channel, job_key, journal_key, result_key, stream_id
from cellama.tasks.contract.shapes.results import usage_of
from cellama.tasks.state import reader

from ....conftest import PATIENCE_S, empty_database, wait_until

NUMBER, JOB = 8, "going-on"
CHANNEL = events_channel(JOB, NUMBER)
AGAIN = Request({"type": "http", "headers": [(b"idempotency-key", b"again")]})


class Counted:
    """An admission that records its calls."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.ends: list[int | None] = []

    async def end(self, num_tokens: int | None) -> None:
        self.ends.append(num_tokens)


Body = Callable[[Gateway, Counted, Redis], Awaitable[None]]


@pytest.fixture
def after_disconnect(
    redis_server: RedisServer, settings_environment: Callable[..., None]
) -> Iterator[Callable[[Body], None]]:
    """Return a function that runs its argument after a client with an idempotency key has disconnected."""
    with empty_database(redis_server, NUMBER) as url, Redis.from_url(url) as redis:
        settings_environment(redis_url=url)
        redis.hset(job_key(JOB), "state", "running")

        async def leave(body: Body) -> None:
            gateway, admission = Gateway(get_settings(), NoKeys()), Counted()
            running = RunningJobs(ParsedRequest(AGAIN, RequestContext(gateway), Caller("acme"), {}), "tiny", "default")
            running._admission = admission
            running.jobs.append(gateway.client.job(JOB))
            await running.close()
            await asyncio.to_thread(wait_until, lambda: redis.pubsub_numsub(CHANNEL)[0][1], "who waits for its end")
            assert admission.ends == []
            await body(gateway, admission, redis)
            await gateway.close()

        yield lambda body: asyncio.run(leave(body))


def test_job_stays_charged_until_it_ends_when_client_disconnects(after_disconnect: Callable[[Body], None]) -> None:
    async def body(_: Gateway, admission: Counted, redis: Redis) -> None:
        usage = usage_of(prompt_tokens=3, completion_tokens=4)
        data: Any = json.dumps({"seq": 0, "type": "done", "finish_reason": "stop", "usage": usage})
        redis.xadd(journal_key(JOB), {"event": data}, id=stream_id(0))
        redis.publish(CHANNEL, data)
        await asyncio.to_thread(wait_until, lambda: admission.ends, "the charge")
        assert admission.ends == [7]

    after_disconnect(body)


def test_job_stays_charged_for_its_estimated_tokens_when_gateway_stops(
    after_disconnect: Callable[[Body], None],
) -> None:
    async def body(gateway: Gateway, admission: Counted, redis: Redis) -> None:
        await asyncio.wait_for(gateway.close(), PATIENCE_S)
        assert admission.ends == [None]
        assert not redis.exists(f"cellama:cancel:{JOB}")

    after_disconnect(body)


def test_repeated_request_gets_the_result_when_events_have_expired(
    redis_server: RedisServer, settings_environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "UNKNOWN_S", 0.01)
    monkeypatch.setattr(reader, "QUIET_S", 0.01)

    async def come_back() -> Any:
        gateway = Gateway(get_settings(), NoKeys())
        try:
            parsed = ParsedRequest(AGAIN, RequestContext(gateway), Caller("acme"), {})
            async with RunningJobs(parsed, "tiny", "default") as running:
                running.jobs.append(gateway.client.job(JOB))
                await running.wait()
                return await running.result()
        finally:
            await gateway.close()

    with empty_database(redis_server, NUMBER) as url, Redis.from_url(url) as redis:
        settings_environment(redis_url=url)
        redis.hset(job_key(JOB), "state", "done")
        redis.set(result_key(JOB), json.dumps({"status": "SUCCESS", "result": {"tokens": [1]}, "task_id": JOB}))
        assert asyncio.run(come_back()) == {"tokens": [1]}

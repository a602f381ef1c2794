"""Limits that gateways in several processes share, and keys while Redis is unreachable."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cellama.api.http.auth import Caller
from cellama.api.http.errors import ApiError
from cellama.api.http.keys.access import KeyAccess, connect_keys
from cellama.api.http.keys.limiter import LEASE_S
from cellama.api.keys.entry import KeyEntry, KeyText, new_key
from cellama.api.keys.store import KeyStore
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.keys import key_admissions_key, key_charges_key, key_jobs_key

from ..conftest import PATIENCE_S, clean_environment, empty_database

GATEWAY = """
import asyncio, json, sys
from cellama.api.http.errors import ApiError
from cellama.api.http.keys.access import KeyAccess
from cellama.api.http.keys.access import connect_keys

async def ask(access, caller, place):
    try:
        admission = await access.admit(caller)
        await admission.reserve(10)
    except ApiError as error:
        return error.status
    if place % 2:
        await admission.end(4)
    return 200

async def main():
    key, number = sys.argv[1:]
    async with connect_keys() as redis:
        access = KeyAccess(redis)
        caller = await access.authenticate({"x-api-key": key})
        print("ready", flush=True)
        sys.stdin.readline()
        asked = [ask(access, caller, place) for place in range(int(number))]
        print(json.dumps(await asyncio.gather(*asked)), flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""
NUM_GATEWAYS, NUM_REQUESTS = 2, 150  # requests per gateway


async def make_key(url: str, **fields: Any) -> KeyText:
    key = new_key()
    async with connect_keys(url) as redis:
        entry = KeyEntry.model_validate({"id": key.id, "digest": key.digest, "tenant": "acme", **fields})
        await KeyStore(redis).write(entry)
    return key


class Gateways:
    """Several processes whose limiters share a Redis."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._processes: list[subprocess.Popen[str]] = []

    def race(self, key: KeyText) -> list[int]:
        """Send requests to all gateways at the same moment and return the responses. The gateways keep running."""
        for _ in range(NUM_GATEWAYS):
            argv = [sys.executable, "-c", GATEWAY, key.text, str(NUM_REQUESTS)]
            environment = clean_environment(CELLAMA_REDIS_URL=self.url)
            process = subprocess.Popen(
                argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
            self._processes.append(process)
        for process in self._processes:
            assert _line(process) == "ready"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
        return [status for process in self._processes for status in json.loads(_line(process))]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate(timeout=PATIENCE_S)
        self._processes.clear()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def database(redis_server: RedisServer) -> Iterator[str]:
    """Return the URL of an empty database, because gateways of other tests have no keys."""
    with empty_database(redis_server, 5) as url:
        yield url


@pytest.fixture
def gateways(database: str) -> Iterator[Gateways]:
    gateways = Gateways(database)
    yield gateways
    gateways.kill()


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({"requests_per_minute": 100}, 100), ({"tokens_per_minute": 505, "requests_per_minute": 1000}, None)],
)
def test_concurrent_gateways_admit_exactly_as_many_requests_as_the_limit_allows(
    gateways: Gateways, limits: dict[str, int], expected: int | None
) -> None:
    key = asyncio.run(make_key(gateways.url, **limits))
    answers = gateways.race(key)
    assert set(answers) == {200, 429}
    with Redis.from_url(gateways.url) as redis:
        charges: Any = redis.hgetall(key_charges_key(key.id))
        num_admitted = redis.zcard(key_admissions_key(key.id))
    num_requests, num_tokens = (int(charges.pop(name)) for name in (b"requests", b"tokens"))
    of_requests = [entry for entry in charges if not entry.startswith(b"x")]
    assert num_requests == len(of_requests)
    assert len(charges) == num_admitted
    assert num_tokens == sum(map(int, charges.values()))
    if expected is None:
        assert num_tokens <= 505
        assert num_requests == NUM_GATEWAYS * NUM_REQUESTS  # includes requests that are refused for their tokens
        assert (
            len(charges) - num_requests == answers.count(200) >= 50
        )  # and more, because ended requests returned 6 of their 10 tokens
    else:
        assert num_requests == answers.count(200) == expected


def test_concurrent_jobs_are_counted_across_gateways_and_released_after_a_crash(gateways: Gateways) -> None:
    key = asyncio.run(make_key(gateways.url, concurrent_jobs=20))
    answers = gateways.race(key)
    assert answers.count(200) >= 20
    with Redis.from_url(gateways.url) as redis:
        jobs: Any = redis.zrange(key_jobs_key(key.id), 0, -1, withscores=True)
        assert 1 <= len(jobs) <= 20
        gateways.kill()
        now: Any = redis.time()
        assert max(score for _, score in jobs) <= now[0] + LEASE_S + 1
        assert 0 < redis.ttl(key_jobs_key(key.id)) <= LEASE_S  # type: ignore[operator]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer.start(tmp_path / "redis") as server:
        yield server


async def outcome(access: KeyAccess, key: KeyText) -> Caller | ApiError:
    try:
        return await access.authenticate({"authorization": f"Bearer {key.text}"})
    except ApiError as error:
        return error


def test_requests_are_rejected_while_redis_is_down_and_admitted_when_it_is_back(server: RedisServer) -> None:
    async def ask() -> None:
        key = await make_key(server.url, requests_per_minute=10, concurrent_jobs=1)
        async with connect_keys(server.url) as redis:
            access = KeyAccess(redis)
            caller = await access.authenticate({"x-api-key": key.text})
            admission = await access.admit(caller)
            server.stop()
            for refused in (await outcome(access, key), await outcome(access, new_key())):
                assert isinstance(refused, ApiError)
                assert (refused.status, refused.headers["retry-after"]) == (503, "1")
                assert str(server.port) not in refused.message  # clients must not receive the address of Redis
            with pytest.raises(ApiError, match="503"):
                await access.admit(caller)
            await admission.end(1)  # raises nothing, because the response has been sent
            server.run()
            assert isinstance(await outcome(access, key), Caller)

    asyncio.run(ask())


def test_hanging_redis_delays_each_request_by_a_limited_time(server: RedisServer) -> None:
    async def ask() -> None:
        key = await make_key(server.url)
        async with connect_keys(server.url) as redis:
            access = KeyAccess(redis)
            assert isinstance(await outcome(access, key), Caller)
            with Redis.from_url(server.url) as other:
                other.execute_command("CLIENT", "PAUSE", 600_000)
            refused = await asyncio.wait_for(outcome(access, key), PATIENCE_S)
            assert isinstance(refused, ApiError)
            assert refused.status == 503

    asyncio.run(ask())

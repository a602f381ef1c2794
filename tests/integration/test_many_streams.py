"""A thousand concurrent streams through one AsyncClient of simulated jobs while connections are killed."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from cellama.api import AsyncClient
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.events import Event
from cellama.tasks.contract.keys import events_channel, job_key, journal_key, stream_id

from ..conftest import PATIENCE_S, wait_until

NUM_STREAMS = 1000
MOST_EVENTS = 80
NUM_KILLS = 5
LATE_S = 10 * PATIENCE_S  # a stream may receive nothing until the producer ends
MOST_CONNECTIONS = 3  # connections of the client: subscriptions, journals, short calls


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer.start(tmp_path / "redis") as server:
        yield server


def connections(redis: Redis) -> list[dict[str, str]]:
    """Return all connections except the one of this client."""
    own = str(redis.client_id())
    return [each for each in redis.client_list() if each["id"] != own]


class Producer(threading.Thread):
    """Publishes the events of all jobs in random order, and kills connections in between."""

    def __init__(self, redis: Redis, lengths: list[int], chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._redis = redis
        self._lengths = lengths
        self._chance = chance
        self.subscribed: list[int] = []  # numbers of subscription connections, observed from time to time
        self.all: list[int] = []

    def run(self) -> None:
        rounds = [place for place, length in enumerate(self._lengths) for _ in range(length)]
        self._chance.shuffle(rounds)
        told = [0] * len(self._lengths)
        page = len(rounds) // (NUM_KILLS * 8)
        for number, start in enumerate(range(0, len(rounds), page)):
            pipe = self._redis.pipeline(transaction=False)
            for job in rounds[start : start + page]:
                self._tell(pipe, job, told)
            pipe.execute()
            if number == 3:  # earlier events may have been published without a subscriber
                wait_until(self._is_heard, "a subscription")
            found = connections(self._redis)
            self.subscribed.append(sum(int(each["sub"]) > 0 for each in found))
            self.all.append(len(found))
            if number % 8 == 4:
                kind = "pubsub" if number % 16 == 4 else "normal"
                self._redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

    def _is_heard(self) -> bool:
        return any(int(each["sub"]) > 0 for each in connections(self._redis))

    def _tell(self, pipe: Any, job: int, told: list[int]) -> None:
        seq, told[job] = told[job], told[job] + 1
        event = {"seq": seq, "type": "token", "text": f" {job}.{seq}", "tokens": [seq]}
        if told[job] == self._lengths[job]:
            event["type"] = "done"
        data = json.dumps(event)
        pipe.xadd(journal_key(f"j{job}"), {"event": data}, id=stream_id(seq))
        pipe.publish(events_channel(f"j{job}", 0), data)


async def read(client: AsyncClient, job: int, after: int, chance: random.Random) -> list[str]:
    texts = []
    async for event in client.stream(f"j{job}", after, LATE_S):
        texts.append(event.get("text", ""))
        if chance.random() < 0.01:  # the reader is busy for a while
            await asyncio.sleep(chance.random() * 0.05)
    return texts


def test_a_thousand_streams_stay_complete_while_connections_are_killed(server: RedisServer) -> None:
    chance = random.Random(7)
    lengths = [chance.randint(1, MOST_EVENTS) for _ in range(NUM_STREAMS)]
    afters = [chance.choice([-1, chance.randrange(-1, length - 1)]) if length > 1 else -1 for length in lengths]

    async def body(redis: Redis) -> None:
        async with AsyncClient(server.url) as client:
            producer = Producer(redis, lengths, chance)
            producer.start()
            reading = [read(client, job, after, random.Random(job)) for job, after in enumerate(afters)]
            texts = await asyncio.gather(*reading)
            await asyncio.to_thread(producer.join)
            assert max(producer.subscribed) == 1
            assert max(producer.all) <= MOST_CONNECTIONS
        for job, found in enumerate(texts):
            assert found == [f" {job}.{seq}" for seq in range(afters[job] + 1, lengths[job])]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with Redis.from_url(server.url, decode_responses=True) as redis:
        for job in range(NUM_STREAMS):
            redis.hset(job_key(f"j{job}"), "state", "running")
        asyncio.run(body(redis))
        wait_until(lambda: not connections(redis), "no connection of the closed client")


def test_streams_survive_a_redis_restart_and_leave_no_subscriptions(server: RedisServer) -> None:
    async def body(redis: Redis) -> None:
        async with AsyncClient(server.url) as client:
            streams = [client.stream(f"j{job}", timeout=PATIENCE_S) for job in range(50)]
            assert await next_seqs(streams) == {0}
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.run)
            tell(redis, 1)
            assert await next_seqs(streams) == {1}
            assert num_channels(redis) == 50
            for stream in streams:
                await stream.aclose()  # type: ignore[attr-defined]
            await asyncio.to_thread(wait_until, lambda: num_channels(redis) == 0, "no subscription left")

    with Redis.from_url(server.url, decode_responses=True) as redis:
        tell(redis, 0)
        asyncio.run(body(redis))


async def next_seqs(streams: list[AsyncIterator[Event]]) -> set[int]:
    return {event["seq"] for event in await asyncio.gather(*map(anext, streams))}


def tell(redis: Redis, seq: int) -> None:
    for job in range(50):
        data = json.dumps({"seq": seq, "type": "token", "text": "x", "tokens": [1]})
        redis.xadd(journal_key(f"j{job}"), {"event": data}, id=stream_id(seq))
        redis.publish(events_channel(f"j{job}", 0), data)


def num_channels(redis: Redis) -> int:
    return len(redis.pubsub_channels("cellama:events:*"))

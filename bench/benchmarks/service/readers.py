"""Many streams that one process reads: over the shared connections of an AsyncClient, and with a connection each.

The events are made up: another process tells one of every stream per step, as workers do. Rounds take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from cellama.api import AsyncClient
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import wait_until
from cellama.bench.peers.lone_readers import events_of
from cellama.tasks.connection.connections import MOST_CONNECTIONS
from cellama.tasks.contract.events import Event
from cellama.tasks.contract.keys import events_channel, job_key, journal_key, stream_id

SHARED, LONE = "shared connections", "a connection each"

Read = Callable[[str], AsyncIterator[Event]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--events", type=int, default=40, help="of each stream")
    parser.add_argument("--rate", type=float, default=4000, help="events per second of all streams together")
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace) -> Report:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, RedisServer.start(Path(folder)) as server:
        for streams in args.streams:
            found: dict[str, list[dict[str, float]]] = {}
            for _ in range(args.rounds):
                for way, read in ((SHARED, _read_shared), (LONE, _read_lone)):
                    found.setdefault(way, []).append(asyncio.run(read(server, streams, args)))
            for way, rounds in found.items():
                middle = {name: median(each[name] for each in rounds) for name in rounds[0]}
                rows.append({"way": way, "streams": streams, **middle})
    ratios = {
        f"{streams} streams: CPU of {LONE} over {SHARED}": _cpu(rows, LONE, streams) / _cpu(rows, SHARED, streams)
        for streams in args.streams
    }
    caveats = ["CPU is that of the reading process alone; late is from the telling of an event to its reader"]
    return Report(rows, ratios, caveats=caveats)


def _cpu(rows: list[dict[str, Any]], way: str, streams: int) -> float:
    return float(next(row["CPU us/event"] for row in rows if (row["way"], row["streams"]) == (way, streams)))


async def _read_shared(server: RedisServer, streams: int, args: argparse.Namespace) -> dict[str, float]:
    async with AsyncClient(server.url) as client:
        return await _measure(server, streams, args, client.stream)


async def _read_lone(server: RedisServer, streams: int, args: argparse.Namespace) -> dict[str, float]:
    async with AsyncRedis.from_url(server.url, max_connections=MOST_CONNECTIONS) as redis:
        return await _measure(server, streams, args, lambda job_id: events_of(redis, job_id))


async def _measure(server: RedisServer, streams: int, args: argparse.Namespace, read: Read) -> dict[str, float]:
    late_ms: list[float] = []

    async def follow(job_id: str) -> None:
        seqs = []
        async for event in read(job_id):
            seqs.append(event["seq"])
            late_ms.append((time.time() - float(event["text"])) * 1e3)  # type: ignore[typeddict-item]
        if seqs != list(range(args.events)):
            raise RuntimeError(f"the stream of {job_id} is {seqs}")

    with Redis.from_url(server.url) as redis:
        redis.flushall()
        for number in range(streams):
            redis.hset(job_key(str(number)), "state", "running")
        reading = asyncio.gather(*(follow(str(number)) for number in range(streams)))
        await asyncio.to_thread(wait_until, lambda: _num_channels(redis) == streams, "all readers")
        connections = len(redis.client_list()) - 1
        teller = multiprocessing.get_context("spawn").Process(target=_tell, args=(server.url, streams, args))
        teller.start()
        used = time.process_time()
        await reading
        used = time.process_time() - used
        teller.join()
    parts = quantiles(late_ms, n=100)
    return {
        "connections": connections,
        "CPU us/event": used * 1e6 / len(late_ms),
        "late p50 ms": parts[49],
        "late p95 ms": parts[94],
    }


def _num_channels(redis: Redis) -> int:
    return len(redis.pubsub_channels("cellama:events:*"))


def _tell(url: str, streams: int, args: argparse.Namespace) -> None:
    """In a process of its own: the events of all streams, step by step."""
    with Redis.from_url(url) as redis:
        begun = time.monotonic()
        for seq in range(args.events):
            time.sleep(max(0.0, begun + seq * streams / args.rate - time.monotonic()))
            kind, pipe = "done" if seq == args.events - 1 else "token", redis.pipeline(transaction=False)
            for number in range(streams):
                data = json.dumps({"seq": seq, "type": kind, "text": str(time.time()), "tokens": [1]})
                pipe.xadd(journal_key(str(number)), {"event": data}, id=stream_id(seq))
                pipe.publish(events_channel(str(number), 0), data)
            pipe.execute()

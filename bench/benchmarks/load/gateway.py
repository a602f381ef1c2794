"""Measure many concurrent streams through a gateway, and the latency that the gateway adds.

First, all streams run concurrently. Each stream must be complete, and its text must equal the result of its job. Then
streams start one after another, both through an AsyncClient and through the gateway. The same clients also measure
llama-server.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from redis import Redis

from cellama.api import AsyncClient
from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.engines import CORES
from cellama.bench.harness.pace import STRATEGY
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, serving
from cellama.bench.peers.gateway_process import gateway
from cellama.bench.peers.http_client import complete_openai
from cellama.bench.peers.programs import llama_server
from cellama.engine.bundled import TINY_PATH

MODEL = "bench"
OURS, GATEWAY, SERVER = "AsyncClient", "gateway", "llama-server"
ADDED = "p95 that the gateway adds to the first token, ms"
CONTEXT = 512  # tokens of a slot
WARM_UP = 8  # streams
PROMPT = "Story {} of a child who went into the wood:"

Ask = Callable[[int, Callable[[], None]], Awaitable[tuple[str, str]]]


@dataclass
class StreamReading:
    """The text that a client read from a stream, and the arrival times of the text's pieces."""

    asked: float = field(default_factory=time.monotonic)
    pieces: list[float] = field(default_factory=list)
    job_id: str = ""
    text: str = ""

    def note(self) -> None:
        self.pieces.append(time.monotonic())

    @property
    def ttft_ms(self) -> float:
        return (self.pieces[0] - self.asked) * 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=1000, help="number of concurrent streams")
    parser.add_argument(
        "--beside", type=int, default=100, help="number of streams for comparing the time to the first token"
    )
    parser.add_argument(
        "--apart-ms", type=float, default=30.0, help="milliseconds between the starts of the compared streams"
    )
    parser.add_argument("--new", type=int, default=64, help="maximum number of tokens per stream")
    parser.add_argument("--slots", type=int, default=128, help="number of slots for the worker and for llama-server")
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, CORES - 1),
        help="number of engine threads (default: all cores except one)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=6,
        help="number of rounds per comparison; a round's p95 varies by about 10 ms",
    )
    parser.add_argument(
        "--pace",
        type=float,
        default=0.05,
        help="minimum duration of a step in seconds, so that cores are not always busy",
    )


def run(args: argparse.Namespace) -> Report:
    path = args.model or TINY_PATH
    model = {"source": str(path), "n_parallel": args.slots, "ctx_per_slot": CONTEXT}
    model |= {"threads": args.threads, "batch_strategy": STRATEGY, "capabilities": ["generate"]}
    port, rows = free_port(), []
    with serving(model) as service, gateway(port), service.slowed(args.pace):
        rows += asyncio.run(_ours(args, service, port))
    with llama_server(path, args.slots, CONTEXT, args.threads) as server:
        if server is not None:
            rows += asyncio.run(_theirs(args, server.port))
    added = _of(rows, GATEWAY, args.beside)["first p95 ms"] - _of(rows, OURS, args.beside)["first p95 ms"]
    caveats = [
        "Clients, gateway, worker and Redis share the cores. A client only reads its socket and parses JSON.",
        "The worker's steps have a minimum duration and llama-server's have none, so don't compare their durations.",
        "With a thread per core, each step waits for threads whose cores other processes use. Use a quiet machine.",
        "wrong: streams whose text differs from the result of their job. llama-server has no such results.",
    ]
    return Report(rows, {ADDED: added}, {ADDED: "<= 20"}, caveats)


def _of(rows: Sequence[dict[str, Any]], who: str, streams: int) -> dict[str, Any]:
    return next(row for row in rows if (row["who"], row["streams"]) == (who, streams))


async def _ours(args: argparse.Namespace, service: Service, port: int) -> list[dict[str, Any]]:
    async with AsyncClient() as client:

        async def direct(number: int, note: Callable[[], None]) -> tuple[str, str]:
            job = await client.generate(MODEL, PROMPT.format(number), max_tokens=args.new, temperature=0, wait=True)
            texts = []
            async for event in job.stream(timeout=600):
                if event["type"] == "token" and event["text"]:
                    texts.append(event["text"])
                    note()
                elif event["type"] == "error":
                    raise RuntimeError(f"job {job.id} failed: {event}")
            return job.id, "".join(texts)

        through = _completions(port, args.new)
        for ask in (direct, through):
            await _all(ask, WARM_UP, 0.0)
        counting = asyncio.create_task(_most_connections(service.redis))
        crowd = [await _row(GATEWAY, client, *await _all(through, args.streams, 0.0))]
        counting.cancel()
        print(f"maximum number of Redis connections of all processes: {await counting}")
        rounds: dict[str, list[dict[str, Any]]] = {}
        for _ in range(args.rounds):
            for who, ask in ((OURS, direct), (GATEWAY, through)):
                found = await _all(ask, args.beside, args.apart_ms / 1e3)
                rounds.setdefault(who, []).append(await _row(who, client, *found))
        return crowd + [_middle(found) for found in rounds.values()]


async def _theirs(args: argparse.Namespace, port: int) -> list[dict[str, Any]]:
    through = _completions(port, args.new)
    await _all(through, WARM_UP, 0.0)
    rows = [await _row(SERVER, None, *await _all(through, args.streams, 0.0))]
    beside = [await _all(through, args.beside, args.apart_ms / 1e3) for _ in range(args.rounds)]
    return [*rows, _middle([await _row(SERVER, None, *found) for found in beside])]


def _completions(port: int, num_new: int) -> Ask:
    async def ask(number: int, note: Callable[[], None]) -> tuple[str, str]:
        identity, text = await complete_openai(port, MODEL, PROMPT.format(number), num_new, note)
        return identity.partition("-")[2], text

    return ask


async def _all(ask: Ask, count: int, apart_s: float) -> tuple[list[StreamReading], float]:
    """Start streams one after another, and return their results and the total seconds."""

    async def one(number: int) -> StreamReading:
        await asyncio.sleep(number * apart_s)
        stream = StreamReading()
        stream.job_id, stream.text = await ask(number, stream.note)
        return stream

    begun = time.monotonic()
    return list(await asyncio.gather(*(one(number) for number in range(count)))), time.monotonic() - begun


async def _most_connections(redis: Redis) -> int:
    """Return the maximum number of Redis connections that were observed until the task was cancelled."""
    most = 0
    with suppress(asyncio.CancelledError):
        while True:
            most = max(most, int(redis.info("clients")["connected_clients"]))
            await asyncio.sleep(0.2)
    return most


async def _row(who: str, client: AsyncClient | None, streams: list[StreamReading], seconds: float) -> dict[str, Any]:
    """Check the streams. If `client` is given, compare their texts with the results of their jobs."""
    wrong = 0
    if client is not None:
        results: list[Any] = [await client.result(stream.job_id, 60) for stream in streams]
        wrong = sum(result["text"] != stream.text for result, stream in zip(results, streams, strict=True))
    firsts = quantiles([stream.ttft_ms for stream in streams], n=100)
    return {
        "who": who,
        "streams": len(streams),
        "wrong": wrong,
        "first p50 ms": firsts[49],
        "first p95 ms": firsts[94],
        "seconds": seconds,
        "pieces/s": sum(len(stream.pieces) for stream in streams) / seconds,
    }


def _middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure, and all violations."""
    numbers = {name: median(row[name] for row in rounds) for name in rounds[0] if name not in ("who", "streams")}
    return {**rounds[0], **numbers, "wrong": sum(row["wrong"] for row in rounds)}

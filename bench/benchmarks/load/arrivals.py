"""Measure requests that arrive as a Poisson process, alone and alongside bulk work.

Every server receives the same requests at the same times. First, all rates are measured without bulk work. Then bulk
work starts, and each server defines how many bulk requests are in flight. After that number of bulk requests has
finished, all rates are measured again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cellama.api import AsyncClient
from cellama.bench.harness.engines import percentile
from cellama.bench.harness.mixed_load import Conversation, LoadShape, conversations, flat
from cellama.bench.harness.service import serving
from cellama.bench.harness.workloads import Line
from cellama.bench.peers.http_client import complete

ALONE, BESIDE = "alone", "beside bulk"
LOADS = (ALONE, BESIDE)
OURS, SERVER = "cellama", "llama-server"
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
THINK_S = 1.0  # between an answer and the next turn of a chat
PATIENCE_S = 600.0
BULK_PRIORITY = 9
BULK_SEED = 1_000_000  # different from each seed of arrivals


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Generates the interactive requests that arrive at each rate, and the bulk lines."""

    rates: Sequence[float]  # requests per second
    shape: LoadShape  # shape of the requests at each rate
    loads: Sequence[str] = LOADS
    seed: int = 0

    def conversations(self, load: str, index: int) -> Sequence[Conversation]:
        """Return new conversations for the rate at `index`, either alone or alongside bulk work."""
        number = 1 + index + len(self.rates) * LOADS.index(load)
        return conversations(self.shape, seed=1000 * self.seed + number)

    def bulk(self) -> Iterator[Line]:
        """Yield an endless sequence of bulk lines with the same mix of lengths."""
        for number in itertools.count(BULK_SEED * (self.seed + 1)):
            yield from flat(conversations(LoadShape(100, scale=self.shape.scale), seed=number))


@dataclass
class StreamTimes:
    """The arrival times of a request's pieces of text, in seconds after the request was sent."""

    line: Line
    began: float = field(default_factory=time.monotonic)
    pieces_s: list[float] = field(default_factory=list)  # when each piece of text came

    def note(self) -> None:
        """Record the arrival of a piece of text."""
        self.pieces_s.append(time.monotonic() - self.began)

    @property
    def ttft_ms(self) -> float:
        return self.pieces_s[0] * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in itertools.pairwise(self.pieces_s)]


class Side(Protocol):
    """A server under test, which keeps `num_bulk` bulk requests in flight."""

    name: str
    num_bulk: int

    async def stream(self, reading: StreamTimes) -> None:
        """Run one interactive request until it ends."""

    async def bulk(self, line: Line) -> None:
        """Run one bulk request until its asyncio task is cancelled."""

    async def settle(self) -> None:
        """Wait until no request is running."""


@dataclass
class Cellama:
    """A cellama worker, which receives requests through Celery and Redis."""

    client: AsyncClient
    num_bulk: int
    name: str = OURS

    async def stream(self, reading: StreamTimes) -> None:
        line = reading.line
        params: dict[str, Any] = {"max_tokens": line.num_new, "temperature": 0, "ignore_eos": True}
        job = await self.client.generate("bench", list(line.prompt), **params)
        async for event in job.stream(timeout=PATIENCE_S):
            if event["type"] == "token":
                reading.note()
            elif event["type"] == "error":
                raise RuntimeError(f"a job failed: {event}")

    async def bulk(self, line: Line) -> None:
        params: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "priority": BULK_PRIORITY, "stream": False}
        job = await self.client.generate("bench", list(line.prompt), max_tokens=line.num_new, **params)
        try:
            await job.result(timeout=3600)
        except asyncio.CancelledError:
            await job.cancel()
            raise

    async def settle(self) -> None:
        while (await self.client.stats())["slots_busy"]:
            await asyncio.sleep(0.1)


@dataclass
class Server:
    """A llama-server, which receives requests over HTTP."""

    port: int
    num_bulk: int
    name: str = SERVER

    async def stream(self, reading: StreamTimes) -> None:
        await complete(self.port, reading.line.prompt, reading.line.num_new, reading.note)

    async def bulk(self, line: Line) -> None:
        await complete(self.port, line.prompt, line.num_new)

    async def settle(self) -> None:
        """Wait for a short request, which completes only after the requests of closed connections have been stopped."""
        await complete(self.port, range(300, 316), 1)


@dataclass(frozen=True, slots=True)
class Phase:
    """The results of one server at one rate, either alone or alongside bulk work."""

    who: str
    load: str
    rate: float
    readings: Sequence[StreamTimes]
    bulk_rate: float = 0.0  # tokens per second of bulk requests that ended in this phase

    def row(self) -> dict[str, Any]:
        ttft = [reading.ttft_ms for reading in self.readings]
        gaps = [gap for reading in self.readings for gap in reading.gaps_ms]
        row = {"part": self.load, "who": self.who, "rate/s": self.rate, "requests": len(self.readings)}
        row |= {f"ttft {name} ms": percentile(ttft, share) for name, share in SHARES.items()}
        row |= {f"gap {name} ms": percentile(gaps, share) for name, share in SHARES.items()}
        return {**row, "bulk tok/s": self.bulk_rate}


class _BulkLoad:
    """Keeps a fixed number of bulk requests in flight within the `running` context."""

    def __init__(self, side: Side, lines: Iterator[Line]) -> None:
        self._side, self._lines = side, lines
        self._in_swing = asyncio.Event()
        self._num_done = 0
        self.num_tokens = 0  # tokens of finished requests

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        over = asyncio.Event()

        async def loop() -> None:
            while not over.is_set():  # a request may take the cancel for its own end (wait_for before Python 3.12)
                line = next(self._lines)
                await self._side.bulk(line)
                self._note(line)

        tasks = [asyncio.create_task(loop()) for _ in range(self._side.num_bulk)]
        try:
            waiting = asyncio.create_task(self._in_swing.wait())
            done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a bulk task ends early only by its error
            yield
        finally:
            over.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note(self, line: Line) -> None:
        self._num_done += 1
        self.num_tokens += line.num_new
        if self._num_done >= self._side.num_bulk:
            self._in_swing.set()


async def measure(side: Side, arrivals: Arrivals) -> list[Phase]:
    """Run all phases on one server."""
    phases = []
    if ALONE in arrivals.loads:
        for index in range(len(arrivals.rates)):
            phases.append(await _phase(side, arrivals, ALONE, index, None))
            await side.settle()
    if BESIDE in arrivals.loads:
        bulk = _BulkLoad(side, arrivals.bulk())
        async with bulk.running():
            for index in range(len(arrivals.rates)):
                phases.append(await _phase(side, arrivals, BESIDE, index, bulk))
    return phases


async def _phase(side: Side, arrivals: Arrivals, load: str, index: int, bulk: _BulkLoad | None) -> Phase:
    rate = arrivals.rates[index]
    before, started = bulk.num_tokens if bulk else 0, time.monotonic()
    readings = await _arrive(side, arrivals.conversations(load, index), rate, arrivals.seed)
    bulk_rate = (bulk.num_tokens - before) / (time.monotonic() - started) if bulk else 0.0
    phase = Phase(side.name, load, rate, readings, bulk_rate)
    first, last = (percentile([reading.ttft_ms for reading in readings], share) for share in (0.5, 0.95))
    print(f"{side.name}, {load}, {rate:.2f}/s: first token {first:.0f} ms, p95 {last:.0f} ms", flush=True)
    return phase


async def _arrive(side: Side, conversations: Sequence[Conversation], rate: float, seed: int) -> list[StreamTimes]:
    """Start conversations as a Poisson process, so that `rate` requests arrive per second on average."""
    rng, at, started = random.Random(seed), 0.0, time.monotonic()
    per_conversation = sum(map(len, conversations)) / len(conversations)
    tasks = []
    for conversation in conversations:
        at += rng.expovariate(rate / per_conversation)
        await asyncio.sleep(started + at - time.monotonic())
        tasks.append(asyncio.create_task(_converse(side, conversation)))
    return [reading for readings in await asyncio.gather(*tasks) for reading in readings]


async def _converse(side: Side, turns: Iterable[Line]) -> list[StreamTimes]:
    readings: list[StreamTimes] = []
    for line in turns:
        if readings:
            await asyncio.sleep(THINK_S)
        readings.append(StreamTimes(line))
        await side.stream(readings[-1])
    return readings


def ask_ours(model: dict[str, Any], num_bulk: int, arrivals: Arrivals) -> list[Phase]:
    """Run all phases with a warm worker that serves this model as "bench"."""

    async def ask() -> list[Phase]:
        client = AsyncClient()
        try:
            await (await client.generate("bench", list(range(300, 316)), max_tokens=4)).result(timeout=300)
            return await measure(Cellama(client, num_bulk), arrivals)
        finally:
            await client.close()

    with serving({"capabilities": ["generate"], "batch_strategy": "adaptive", **model}):
        return asyncio.run(ask())

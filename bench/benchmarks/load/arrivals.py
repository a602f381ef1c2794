"""Requests that arrive one by one, as a Poisson process, alone and beside a bulk load: what their readers see.

Every side gets the same arrivals at the same times. First come all rates alone; then the bulk load begins, as many
requests in flight as the side says, and when as many have ended, so that it is in full swing, all rates come again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cellama.api import AsyncClient
from cellama.bench.harness.engines import percentile
from cellama.bench.harness.mixed_load import Conversation
from cellama.bench.harness.service import Service
from cellama.bench.harness.workloads import Line

from .sides import Cellama, Reading, Side

ALONE, BESIDE = "alone", "beside bulk"
LOADS = (ALONE, BESIDE)
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
THINK_S = 1.0  # between an answer and the next turn of a chat


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What arrives. `conversations` gives those of a phase by its seed; `bulk` gives bulk lines without an end."""

    rates: Sequence[float]  # requests per second
    conversations: Callable[[int], Sequence[Conversation]]
    bulk: Callable[[int], Iterator[Line]]
    loads: Sequence[str] = LOADS
    seed: int = 0

    def of_phase(self, load: str, index: int) -> tuple[float, Sequence[Conversation]]:
        """The rate, and what comes, which no side has seen before."""
        number = 1 + index + len(self.rates) * LOADS.index(load)
        return self.rates[index], self.conversations(1000 * self.seed + number)


@dataclass(frozen=True, slots=True)
class Phase:
    """One rate under one load, as it went."""

    who: str
    load: str
    rate: float
    readings: Sequence[Reading]
    bulk_rate: float = 0.0  # tokens per second of bulk requests that ended meanwhile

    def row(self) -> dict[str, Any]:
        ttft = [reading.ttft_ms for reading in self.readings]
        gaps = [gap for reading in self.readings for gap in reading.gaps_ms]
        row = {"who": self.who, "load": self.load, "rate/s": self.rate, "requests": len(self.readings)}
        row |= {f"ttft {name} ms": percentile(ttft, share) for name, share in SHARES.items()}
        row |= {f"gap {name} ms": percentile(gaps, share) for name, share in SHARES.items()}
        return {**row, "bulk tok/s": self.bulk_rate}


class _Bulk:
    """Bulk requests, kept in flight within `running`."""

    def __init__(self, side: Side, lines: Iterator[Line]) -> None:
        self._side, self._lines = side, lines
        self._in_swing = asyncio.Event()
        self._num_done = 0
        self.num_tokens = 0  # of those that have ended

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
    """All phases at one side."""
    phases = []
    if ALONE in arrivals.loads:
        for index in range(len(arrivals.rates)):
            phases.append(await _phase(side, arrivals, ALONE, index, None))
            await side.settle()
    if BESIDE in arrivals.loads:
        bulk = _Bulk(side, arrivals.bulk(arrivals.seed))
        async with bulk.running():
            for index in range(len(arrivals.rates)):
                phases.append(await _phase(side, arrivals, BESIDE, index, bulk))
    return phases


async def _phase(side: Side, arrivals: Arrivals, load: str, index: int, bulk: _Bulk | None) -> Phase:
    rate, conversations = arrivals.of_phase(load, index)
    before, started = bulk.num_tokens if bulk else 0, time.monotonic()
    readings = await _arrive(side, conversations, rate, arrivals.seed)
    bulk_rate = (bulk.num_tokens - before) / (time.monotonic() - started) if bulk else 0.0
    phase = Phase(side.name, load, rate, readings, bulk_rate)
    first, last = (percentile([reading.ttft_ms for reading in readings], share) for share in (0.5, 0.95))
    print(f"{side.name}, {load}, {rate:.2f}/s: first token {first:.0f} ms, p95 {last:.0f} ms", flush=True)
    return phase


async def _arrive(side: Side, conversations: Sequence[Conversation], rate: float, seed: int) -> list[Reading]:
    """Begins conversations at times of a Poisson process, so that requests come at this rate in the mean."""
    rng, at, started = random.Random(seed), 0.0, time.monotonic()
    per_conversation = sum(map(len, conversations)) / len(conversations)
    tasks = []
    for conversation in conversations:
        at += rng.expovariate(rate / per_conversation)
        await asyncio.sleep(started + at - time.monotonic())
        tasks.append(asyncio.create_task(_converse(side, conversation)))
    return [reading for readings in await asyncio.gather(*tasks) for reading in readings]


async def _converse(side: Side, turns: Iterable[Line]) -> list[Reading]:
    readings: list[Reading] = []
    for line in turns:
        if readings:
            await asyncio.sleep(THINK_S)
        readings.append(Reading(line))
        await side.stream(readings[-1])
    return readings


def ask_ours(model: dict[str, Any], num_bulk: int, arrivals: Arrivals) -> list[Phase]:
    """All phases with a worker of our own, warm, that serves this model as "bench"."""

    async def ask() -> list[Phase]:
        client = AsyncClient()
        try:
            await (await client.generate("bench", list(range(300, 316)), max_tokens=4)).result(timeout=300)
            return await measure(Cellama(client, num_bulk), arrivals)
        finally:
            await client.close()

    own = {"id": "bench", "default": True, "capabilities": ["generate"], "batch_strategy": "adaptive", **model}
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [own]) as service:
        service.start_worker()
        service.wait_ready()
        return asyncio.run(ask())

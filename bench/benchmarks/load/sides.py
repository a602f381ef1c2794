"""Who is asked when requests arrive one by one: our service through Celery and Redis, or llama-server over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cellama.api import AsyncClient
from cellama.bench.harness.workloads import Line
from cellama.bench.peers.server_client import complete

BULK_PRIORITY = 9
OURS, SERVER = "cellama", "llama-server"
PATIENCE_S = 600.0


@dataclass
class Reading:
    """One request as its reader sees it. Seconds, from when the reader began to send it."""

    line: Line
    began: float = field(default_factory=time.monotonic)
    sent_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)  # when each piece of text came
    timings: Mapping[str, Any] = field(default_factory=dict)  # what our service says of it at its end

    def since(self) -> float:
        return time.monotonic() - self.began

    def note(self) -> None:
        """A piece has come."""
        self.pieces_s.append(self.since())

    @property
    def ttft_ms(self) -> float:
        return self.pieces_s[0] * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in itertools.pairwise(self.pieces_s)]


class Side(Protocol):
    """Who is asked. `num_bulk` bulk requests are kept in flight."""

    name: str
    num_bulk: int

    async def stream(self, reading: Reading) -> None:
        """One interactive request, to its end."""

    async def bulk(self, line: Line) -> None:
        """One bulk request. Ends with the task that runs it."""

    async def settle(self) -> None:
        """Waits until nothing runs any more."""


@dataclass
class Cellama:
    """Our worker, through Celery and Redis."""

    client: AsyncClient
    num_bulk: int
    name: str = OURS

    async def stream(self, reading: Reading) -> None:
        line = reading.line
        job = await self.client.generate(
            "bench", list(line.prompt), max_tokens=line.num_new, temperature=0, ignore_eos=True
        )
        reading.sent_s = reading.since()
        async for event in job.stream(timeout=PATIENCE_S):
            if event["type"] == "token":
                reading.note()
            elif event["type"] == "done":
                reading.timings = event["timings"]
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
    """llama-server over HTTP."""

    port: int
    num_bulk: int
    name: str = SERVER

    async def stream(self, reading: Reading) -> None:
        await complete(self.port, reading.line.prompt, reading.line.num_new, reading.note)

    async def bulk(self, line: Line) -> None:
        await complete(self.port, line.prompt, line.num_new)

    async def settle(self) -> None:
        """The server ends what it does for closed connections; a request of its own waits for that."""
        await complete(self.port, range(300, 316), 1)

"""Poisson arrivals of interactive requests: latency alone and beside a bulk load, through Celery and from llama-server.

Both sides get the same arrivals at the same times. A bulk load keeps requests in flight: twice as many as slots on our
side; --server-bulk of them at llama-server, which knows no priorities, so that slots stay free for others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cellama.api import AsyncClient
from cellama.bench.benchmarks.engine.decode import context
from cellama.bench.harness.engines import CORES, model_path, percentile, random_prompts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service
from cellama.bench.peers.programs import LLAMA_SERVER, LlamaServer, program
from cellama.bench.peers.server_client import complete

BULK_PRIORITY = 9
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
OURS, SERVER = "cellama", "llama-server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="arrivals per second")
    parser.add_argument("--requests", type=int, default=100, help="interactive ones, at each rate")
    parser.add_argument("--prompt", type=int, default=128, help="tokens, of all requests")
    parser.add_argument("--new", type=int, default=64, help="tokens, of all requests")
    parser.add_argument("--slots", type=int, default=32, help="of both sides")
    parser.add_argument("--server-bulk", type=int, default=16, help="bulk requests in flight at llama-server")
    parser.add_argument("--threads", type=int, default=CORES, help="of both sides")
    parser.add_argument("--seed", type=int, default=0)


class Side(Protocol):
    """Who is asked."""

    name: str
    num_bulk: int

    async def stream(self, prompt: list[int], num_new: int, note: Callable[[], None]) -> None:
        """One interactive request; `note` is called with each piece of text that arrives."""

    async def bulk(self, prompt: list[int], num_new: int) -> None:
        """One bulk request. Ends with the task that runs it."""

    async def settle(self) -> None:
        """Waits until nothing runs any more."""


@dataclass
class Cellama:
    """Our worker, through Celery and Redis."""

    client: AsyncClient
    num_bulk: int
    name: str = OURS

    async def stream(self, prompt: list[int], num_new: int, note: Callable[[], None]) -> None:
        job = await self.client.generate("bench", prompt, max_tokens=num_new, temperature=0, ignore_eos=True)
        async for event in job.stream(timeout=600):
            if event["type"] == "token":
                note()
            elif event["type"] == "error":
                raise RuntimeError(f"a job failed: {event}")

    async def bulk(self, prompt: list[int], num_new: int) -> None:
        params: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "priority": BULK_PRIORITY, "stream": False}
        job = await self.client.generate("bench", prompt, max_tokens=num_new, **params)
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

    async def stream(self, prompt: list[int], num_new: int, note: Callable[[], None]) -> None:
        await complete(self.port, prompt, num_new, note)

    async def bulk(self, prompt: list[int], num_new: int) -> None:
        await complete(self.port, prompt, num_new)

    async def settle(self) -> None:
        """The server ends what it does for closed connections; a request of its own waits for that."""
        await complete(self.port, range(300, 316), 1)


@dataclass
class _Times:
    """What readers saw, in milliseconds."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def reader(self) -> Callable[[], None]:
        """Notes one request from now on."""
        last, values = time.monotonic(), self.ttft

        def note() -> None:
            nonlocal last, values
            now = time.monotonic()
            values.append((now - last) * 1e3)
            last, values = now, self.gaps

        return note


class _Bulk:
    """Bulk requests, kept in flight within `running`."""

    def __init__(self, side: Side, args: argparse.Namespace) -> None:
        self._side, self._num_new = side, args.new
        self._prompts = _endless_prompts(args.prompt, args.seed + 1)
        self.num_done = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        first, over = asyncio.Event(), asyncio.Event()

        async def loop() -> None:
            while not over.is_set():  # a request may take the cancel for its own end (wait_for before Python 3.12)
                await self._side.bulk(next(self._prompts), self._num_new)
                self.num_done += 1
                first.set()

        tasks = [asyncio.create_task(loop()) for _ in range(self._side.num_bulk)]
        try:
            waiting = asyncio.create_task(first.wait())
            done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a bulk task ends early only by its error
            yield
        finally:
            over.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _endless_prompts(length: int, seed: int) -> Iterator[list[int]]:
    while True:
        yield from random_prompts(100, length, seed=seed)
        seed += 1000


def run(args: argparse.Namespace) -> Report:
    path, program_ = model_path(args.model), program(LLAMA_SERVER)
    rows = _ask_ours(path, args)
    if program_:
        options = [
            "-np",
            str(args.slots),
            "-c",
            str(context(args.slots, args.prompt, args.new)),
            "-t",
            str(args.threads),
        ]
        with LlamaServer.start(program_, path, *options) as server:
            server.complete(range(300, 316), 4)
            rows += asyncio.run(_measure(Server(server.port, args.server_bulk), args))
    caveats = [
        "TTFT and gaps are those that a reader in this process sees; a gap lies between two pieces of text, which have "
        "one token mostly. Bulk tokens/s counts the bulk requests that ended while interactive ones were on their way.",
    ]
    return Report(rows, _ratios(rows), caveats=caveats)


def _ask_ours(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    model = {"id": "bench", "source": str(path), "n_parallel": args.slots, "default": True, "threads": args.threads}
    model |= {"n_ctx": context(args.slots, args.prompt, args.new), "capabilities": ["generate"]}
    model["batch_strategy"] = "adaptive"

    async def ask() -> list[dict[str, Any]]:
        client = AsyncClient()
        try:
            await (await client.generate("bench", list(range(300, 316)), max_tokens=4)).result(timeout=300)
            return await _measure(Cellama(client, 2 * args.slots), args)
        finally:
            await client.close()

    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [model]) as service:
        service.start_worker()
        service.wait_ready()
        return asyncio.run(ask())


async def _measure(side: Side, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for index, rate in enumerate(args.rates):
        prompts = random_prompts(2 * args.requests, args.prompt, seed=args.seed + 7 * index + 3)
        times, _ = await _arrive(side, prompts[: args.requests], rate, args)
        rows.append(_row(side, "alone", rate, times))
        await side.settle()
        bulk = _Bulk(side, args)
        async with bulk.running():
            before = bulk.num_done
            times, seconds = await _arrive(side, prompts[args.requests :], rate, args)
            rate_of_bulk = (bulk.num_done - before) * args.new / seconds
        rows.append(_row(side, "beside bulk", rate, times, rate_of_bulk))
        await side.settle()
    return rows


async def _arrive(
    side: Side, prompts: Sequence[list[int]], rate: float, args: argparse.Namespace
) -> tuple[_Times, float]:
    """Sends the prompts at times of a Poisson process; what was seen, and seconds until the last ended."""
    rng, times, at = random.Random(args.seed), _Times(), 0.0
    started, tasks = time.monotonic(), []
    for prompt in prompts:
        at += rng.expovariate(rate)
        await asyncio.sleep(started + at - time.monotonic())
        tasks.append(asyncio.create_task(side.stream(prompt, args.new, times.reader())))
    await asyncio.gather(*tasks)
    return times, time.monotonic() - started


def _row(side: Side, load: str, rate: float, times: _Times, bulk: float = 0.0) -> dict[str, Any]:
    row = {"who": side.name, "load": load, "rate/s": rate, "requests": len(times.ttft)}
    row |= {f"ttft {name} ms": percentile(times.ttft, share) for name, share in SHARES.items()}
    row |= {f"gap {name} ms": percentile(times.gaps, share) for name, share in SHARES.items()}
    return {**row, "bulk tok/s": bulk}


def _ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """llama-server's times over ours."""
    by_side = {name: [row for row in rows if row["who"] == name] for name in (OURS, SERVER)}
    ratios = {}
    for one, other in zip(by_side[OURS], by_side[SERVER], strict=False):
        name = f"{one['load']}, {one['rate/s']:g}/s"
        for column in ("ttft p50 ms", "ttft p95 ms", "gap p95 ms"):
            ratios[f"{name}: {SERVER}'s {column[:-3]} over ours"] = other[column] / one[column]
    return ratios

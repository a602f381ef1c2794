"""Measure first tokens when many small models share the memory of a few, against llama-server's router mode.

Requests arrive as a Poisson process, and choose their models by a Zipf distribution. Both servers get the same files
and the same arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cellama.api import AsyncClient, Client
from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service
from cellama.bench.models.synthetic import Shape, write_model
from cellama.bench.peers.http_client import complete_openai
from cellama.bench.peers.programs import LLAMA_SERVER, program, served, server_environment
from cellama.tasks.worker.residency import bound_s

# 52M parameters. The vocabulary is most of the file, so that a load takes long in relation to a token.
SHAPE = Shape(n_embd=384, n_layer=16, n_head=6, n_head_kv=2, n_ff=1152, n_vocab=32768, n_ctx=2048)
MODEL = "synthetic 52M Q8_0, copies of one file"
CONTEXT_TOKENS, SLOTS = 512, 4
SWAP_AFTER_S = 5.0
PROMPT = "a b c d e f g h"
MEMORY_POLL_S = 0.5
CAVEATS = [
    "Both servers have loaded each model once before. cellama's first load of a file takes longer, because a child "
    "process checks the file.",
    "All copies of the model have the same weights, and their files are in the page cache.",
    "The longest wait includes the time in the queue and the prefill.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=int, default=20, help="number of models")
    parser.add_argument("--room", type=int, default=3, help="number of models that fit into memory")
    parser.add_argument("--requests", type=int, default=120, help="number of requests")
    parser.add_argument("--rate", type=float, default=1.5, help="mean arrivals per second")
    parser.add_argument("--new", type=int, default=8, help="tokens per reply")
    parser.add_argument("--seed", type=int, default=38, help="seed of the arrivals")
    parser.add_argument("--no-server", action="store_true", help="omit llama-server")


@dataclass(frozen=True)
class OnDemandRun:
    """The times to the first token of one server, in seconds."""

    server: str
    requests: int
    median_s: float
    p95_s: float
    longest_s: float
    loads: int | None


@dataclass(frozen=True)
class Arrival:
    """A request that is sent `at_s` seconds after the start."""

    at_s: float
    model: str


Send = Callable[[str, Callable[[], None]], Awaitable[None]]  # sends a request to a model, and notes its tokens


def run(args: argparse.Namespace) -> Report:
    arrivals = _arrivals(args)
    rows: list[OnDemandRun] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        first = folder / "models" / "m0.gguf"
        write_model(first, SHAPE)
        for number in range(1, args.models):
            shutil.copy(first, first.with_name(f"m{number}.gguf"))
        needed = _memory_of_one(folder, first)
        budget = int(needed * (args.room + 0.5))
        ours, ratios, wrong = _cellama(folder, args, arrivals, budget)
        rows.append(ours)
        targets = {"loads / offline optimum": "<= 1.3", "longest wait / bound": "<= 2"}
        peer = None if args.no_server else program(LLAMA_SERVER)
        if peer is not None:
            theirs = _router(peer, folder / "models", args, arrivals)
            rows.append(theirs)
            ratios["p95 of the first token / llama-server"] = ours.p95_s / theirs.p95_s
            targets["p95 of the first token / llama-server"] = "<= 0.5"
    return Report([asdict(row) for row in rows], ratios, targets, CAVEATS, wrong)


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    generator, at_s = random.Random(args.seed), 0.0
    names = [f"m{rank}" for rank in range(args.models)]
    weights = [1 / (rank + 1) for rank in range(args.models)]
    arrivals = []
    for model in generator.choices(names, weights, k=args.requests):
        at_s += generator.expovariate(args.rate)
        arrivals.append(Arrival(at_s, model))
    return arrivals


async def _warm_up(arrivals: Sequence[Arrival], send: Send) -> None:
    """Send one request to each model, so that the files are known and in the page cache."""
    for model in _models(arrivals):
        await send(model, lambda: None)


def _models(arrivals: Sequence[Arrival]) -> list[str]:
    return sorted({arrival.model for arrival in arrivals})


async def _replay(arrivals: Sequence[Arrival], send: Send) -> tuple[list[float], list[str]]:
    """Send the requests. Return their times to the first token, and the models in the order of the first tokens."""
    started, order, waits_s = time.monotonic(), list[str](), list[float]()

    async def one(arrival: Arrival) -> None:
        await asyncio.sleep(max(0.0, started + arrival.at_s - time.monotonic()))
        sent, first = time.monotonic(), list[float]()

        def note() -> None:
            if not first:
                first.append(time.monotonic())
                order.append(arrival.model)

        await send(arrival.model, note)
        waits_s.append((first[0] if first else time.monotonic()) - sent)

    await asyncio.gather(*map(one, arrivals))
    return waits_s, order


def _row(server: str, waits_s: Sequence[float], loads: int | None) -> OnDemandRun:
    median_s, p95_s = np.percentile(waits_s, [50, 95])
    return OnDemandRun(server, len(waits_s), float(median_s), float(p95_s), max(waits_s), loads)


# cellama


@contextlib.contextmanager
def _service(folder: Path, models: Sequence[str], source: Path, budget: str) -> Iterator[Service]:
    options = {"on_demand": True, "keep_alive_s": -1, "batch_strategy": "adaptive", "cache_ram_bytes": 0}
    options |= {"n_parallel": SLOTS, "ctx_per_slot": CONTEXT_TOKENS}
    settings = [{"id": model, "source": str(source.with_name(f"{model}.gguf")), **options} for model in models]
    with Service(folder, settings, memory_budget=budget, swap_after_s=str(SWAP_AFTER_S)) as service:
        service.start_worker()
        service.wait_ready()
        yield service
    os.environ.pop("CELLAMA_MODELS", None)


def _memory_of_one(folder: Path, source: Path) -> int:
    """Return the bytes that a loaded model uses."""
    (folder / "one").mkdir()
    with _service(folder / "one", ["m0"], source, "auto"), Client() as client:
        client.generate("m0", PROMPT, max_tokens=1).result(60)
        return max(int(model.get("memory_bytes", 0)) for model in client.memory()[0]["models"])


def _cellama(
    folder: Path, args: argparse.Namespace, arrivals: Sequence[Arrival], budget: int
) -> tuple[OnDemandRun, dict[str, float], list[str]]:
    (folder / "all").mkdir()
    names = [f"m{number}" for number in range(args.models)]
    with _service(folder / "all", names, folder / "models" / "m0.gguf", str(budget)) as service:
        waits_s, order, peak, load_s = asyncio.run(_measure(args, arrivals))
        num_loads = _num_loads(service) - len(_models(arrivals))
    optimum = _num_optimal_loads(order, args.room, _models(arrivals)[-args.room :])
    ratios = {
        "loads / offline optimum": num_loads / optimum,
        "longest wait / bound": max(waits_s) / bound_s(load_s, SWAP_AFTER_S),
        "memory / budget": peak / budget,
    }
    wrong = [f"the models used {peak} bytes, and the budget is {budget} bytes"] if peak > budget else []
    return _row("cellama", waits_s, num_loads), ratios, wrong


def _num_loads(service: Service) -> int:
    return sum(service.log(name).count("model loaded") for name in service.processes)


async def _measure(args: argparse.Namespace, arrivals: Sequence[Arrival]) -> tuple[list[float], list[str], int, float]:
    """Return the waits, the models in the order of the first tokens, the peak of the memory, and the longest load."""
    peak, load_s = 0, 0.0

    async def watch(client: AsyncClient) -> None:
        nonlocal peak, load_s
        while True:
            for worker in await client.workers():
                peak = max(peak, sum(int(model.get("memory_bytes", 0)) for model in worker.models))
                load_s = max([load_s, *(float(model.get("load_s", 0.0)) for model in worker.models)])
            await asyncio.sleep(MEMORY_POLL_S)

    async with AsyncClient() as client:

        async def send(model: str, note: Callable[[], None]) -> None:
            job: Any = await client.generate(
                model, PROMPT, max_tokens=args.new, temperature=0, ignore_eos=True, wait=True
            )
            async for event in job.stream():
                if event["type"] == "token":
                    note()

        await _warm_up(arrivals, send)
        watcher = asyncio.create_task(watch(client))
        waits_s, order = await _replay(arrivals, send)
        watcher.cancel()
    return waits_s, order, peak, load_s


def _num_optimal_loads(order: Sequence[str], room: int, first: Sequence[str]) -> int:
    """Return the fewest loads for this sequence of jobs: evict the model whose next job is last (Belady).

    `first` are the models that are loaded at the start.
    """
    loaded, num_loads = set(first), 0
    for at, name in enumerate(order):
        if name not in loaded:
            num_loads += 1
            rest = order[at:]
            if len(loaded) == room:
                loaded.remove(max(loaded, key=lambda each: rest.index(each) if each in rest else len(rest)))
            loaded.add(name)
    return num_loads


# llama-server


def _router(path: Path, models: Path, args: argparse.Namespace, arrivals: Sequence[Arrival]) -> OnDemandRun:
    port = free_port()
    command = [str(path), "--models-dir", str(models), "--models-max", str(args.room), "--port", str(port)]
    command += ["-np", str(SLOTS), "-c", str(SLOTS * CONTEXT_TOKENS), "-t", str(len(os.sched_getaffinity(0)))]

    async def send(model: str, note: Callable[[], None]) -> None:
        await complete_openai(port, model, PROMPT, args.new, note)

    with served(command, server_environment(path), port, "/health"):
        asyncio.run(_warm_up(arrivals, send))
        waits_s, _ = asyncio.run(_replay(arrivals, send))
    return _row("llama-server, router mode", waits_s, None)

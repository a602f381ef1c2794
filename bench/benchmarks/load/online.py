"""Poisson arrivals of interactive requests: latency alone and beside a bulk load, through Celery and from llama-server.

Both sides get the same arrivals at the same times. A bulk load keeps requests in flight: twice as many as slots on our
side; --server-bulk of them at llama-server, which knows no priorities, so that slots stay free for others.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from cellama.bench.benchmarks.engine.decode import context
from cellama.bench.harness.engines import CORES, model_path
from cellama.bench.harness.mixed_load import Conversation
from cellama.bench.harness.report import Report
from cellama.bench.harness.workloads import Line, independent
from cellama.bench.peers.programs import LLAMA_SERVER, LlamaServer, program

from .arrivals import Arrivals, ask_ours, measure
from .sides import OURS, SERVER, Server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="arrivals per second")
    parser.add_argument("--requests", type=int, default=100, help="interactive ones, at each rate")
    parser.add_argument("--prompt", type=int, default=128, help="tokens, of all requests")
    parser.add_argument("--new", type=int, default=64, help="tokens, of all requests")
    parser.add_argument("--slots", type=int, default=32, help="of both sides")
    parser.add_argument("--server-bulk", type=int, default=16, help="bulk requests in flight at llama-server")
    parser.add_argument("--threads", type=int, default=CORES, help="of both sides")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path, program_ = model_path(args.model), program(LLAMA_SERVER)
    size, arrivals = context(args.slots, args.prompt, args.new), _arrivals(args)
    model = {"source": str(path), "n_parallel": args.slots, "threads": args.threads, "n_ctx": size}
    phases = ask_ours(model, 2 * args.slots, arrivals)
    if program_:
        options = ["-np", str(args.slots), "-c", str(size), "-t", str(args.threads)]
        with LlamaServer.start(program_, path, *options) as server:
            server.complete(range(300, 316), 4)
            phases += asyncio.run(measure(Server(server.port, args.server_bulk), arrivals))
    rows = [phase.row() for phase in phases]
    caveats = [
        "TTFT and gaps are those that a reader in this process sees; a gap lies between two pieces of text, which have "
        "one token mostly. Bulk tokens/s counts the bulk requests that ended while interactive ones were on their way.",
    ]
    return Report(rows, _ratios(rows), caveats=caveats)


def _arrivals(args: argparse.Namespace) -> Arrivals:
    def conversations(seed: int) -> list[Conversation]:
        return [(line,) for line in independent(args.requests, args.prompt, args.new, seed=seed)]

    def bulk(seed: int) -> Iterator[Line]:
        for number in itertools.count(1_000_000 * (seed + 1)):  # no seed that arrivals have
            yield from independent(100, args.prompt, args.new, seed=number)

    return Arrivals(args.rates, conversations, bulk, seed=args.seed)


def _ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """llama-server's times over ours."""
    by_side = {name: [row for row in rows if row["who"] == name] for name in (OURS, SERVER)}
    ratios = {}
    for one, other in zip(by_side[OURS], by_side[SERVER], strict=False):
        name = f"{one['load']}, {one['rate/s']:g}/s"
        for column in ("ttft p50 ms", "ttft p95 ms", "gap p95 ms"):
            ratios[f"{name}: {SERVER}'s {column[:-3]} over ours"] = other[column] / one[column]
    return ratios

"""Compare cellama with llama-server on a load of mixed lengths, with shared prefixes and optional chats.

First, all requests are sent at once, either directly to the engine, as jobs, with `cellama batch run`, or to
llama-server with each number of slots in --server-slots. Then requests arrive as a Poisson process at fractions of
llama-server's rate, alone and alongside bulk work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import CORES, model_path
from cellama.bench.harness.mixed_load import LoadShape, flat, sizes
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import LLAMA_SERVER, llama_server, program

from . import at_once
from .arrivals import ALONE, BESIDE, LOADS, OURS, Arrivals, Phase, Server, ask_ours, measure

PARTS = (at_once.PART, *LOADS)
TTFT, GAPS = ("ttft p50 ms", "ttft p95 ms"), ("gap p50 ms", "gap p95 ms", "gap p99 ms")
CAVEATS = (
    "Clients and servers share the cores. For requests that are sent at once, ratios compare rates, so cellama is "
    "faster if they are above 1. For arrivals, ratios compare times, so cellama is faster if they are below 1. Times "
    "include the start of the command `cellama batch run`, but not the start of servers and workers.",
    "Clients in this process measure first tokens and gaps. bulk tok/s counts the bulk requests that ended while other "
    "requests were arriving.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts of the benchmark to run")
    add("--requests", type=int, default=160, help="number of requests to send simultaneously")
    add("--chats", type=int, default=0, help="number of multi-turn conversations among the requests")
    add("--turns", type=int, default=4, help="number of requests per chat")
    add("--scale", type=float, default=1.0, help="factor by which all lengths are multiplied")
    add("--rounds", type=int, default=1, help="number of times to send all requests simultaneously; medians are shown")
    add(
        "--ours",
        nargs="+",
        choices=list(at_once.OURS),
        default=list(at_once.OURS),
        help="variants of cellama to measure",
    )
    add("--slots", type=int, default=64, help="number of cellama slots, unless set by --options")
    add("--options", type=json.loads, default={}, help="engine options for cellama, as JSON")
    add(
        "--server-slots",
        type=int,
        nargs="*",
        default=[16, 32, 64],
        help="values of -np to measure for llama-server",
    )
    add("--arrivals", type=int, default=80, help="number of requests per arrival rate")
    add(
        "--shares",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.8],
        help="arrival rates relative to llama-server's rate",
    )
    add(
        "--rates",
        type=float,
        nargs="*",
        default=[],
        help="arrival rates in requests per second, instead of fractions of llama-server's rate",
    )
    add("--threads", type=int, default=CORES, help="number of threads per server")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    args.slots = args.options.get("n_parallel", args.slots)
    path, server = model_path(args.model), program(LLAMA_SERVER)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    targets: dict[str, str] = {}
    best_slots, rates = max(args.server_slots, default=0), args.rates
    if at_once.PART in args.parts or not rates:
        found = at_once.measure(path, server, args)
        rows += found.rows()
        ratios |= found.ratios()
        targets |= dict.fromkeys(ratios, at_once.TARGET)
        best = found.best_server or next(iter(found.seconds))
        best_slots = found.slots[best]
        rates = rates or [share * found.requests_per_s(best) for share in args.shares]
    loads = [load for load in LOADS if load in args.parts]
    if loads:
        num_chats = args.chats * args.arrivals // args.requests
        shape = LoadShape(args.arrivals, num_chats, args.turns, args.scale)
        phases = _arrive(path, args, best_slots, Arrivals(rates, shape, loads, args.seed))
        rows += [phase.row() for phase in phases]
        of_times, expected = compare(phases)
        ratios, targets = ratios | of_times, targets | expected
    return Report(rows, ratios, targets, CAVEATS)


def _arrive(path: Path, args: argparse.Namespace, server_slots: int, arrivals: Arrivals) -> list[Phase]:
    longest = _longest(arrivals)
    phases = ask_ours({"source": str(path), **at_once.options_of(args, longest)}, 2 * args.slots, arrivals)
    if not server_slots:
        return phases
    with llama_server(path, server_slots, longest + 1, args.threads) as server:
        if server:
            phases += asyncio.run(measure(Server(server.port, max(1, server_slots // 2)), arrivals))
    return phases


def _longest(arrivals: Arrivals) -> int:
    """Return the token count of the longest request in any phase. Bulk requests do not contain chats."""
    phases = [arrivals.conversations(load, index) for load in arrivals.loads for index in range(len(arrivals.rates))]
    return max(LoadShape(1, scale=arrivals.shape.scale).longest, *(sizes(flat(phase)).longest for phase in phases))


def compare(phases: Sequence[Phase]) -> tuple[dict[str, float], dict[str, str]]:
    """Return cellama's times and bulk rates relative to llama-server's, and the targets for these ratios."""
    ratios: dict[str, float] = {}
    targets: dict[str, str] = {}
    ours = [phase for phase in phases if phase.who == OURS]
    for one, other in zip(ours, [phase for phase in phases if phase.who != OURS], strict=False):
        mine, theirs, name = one.row(), other.row(), f"{one.load}, {one.rate:.2g}/s"
        for column in (*TTFT, *GAPS):
            key = f"{name}: {column[:-3]}, ours over {other.who}'s"
            ratios[key] = mine[column] / theirs[column]
            targets[key] = "<= 1.0" if one.load == ALONE and column in GAPS else "<= 0.9"
        if one.load == BESIDE and other.bulk_rate:
            key = f"{name}: bulk rate, ours over {other.who}'s"
            ratios[key], targets[key] = one.bulk_rate / other.bulk_rate, ">= 1.0"
    return ratios, targets

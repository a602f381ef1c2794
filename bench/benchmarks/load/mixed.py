"""A load of mixed lengths, with families that share a head, and chats on request, against llama-server.

All at once: the engine alone, jobs through the queue, `cellama batch run`, llama-server with each of --server-slots,
and what it would take if every pass of llama.cpp were a full one.
"""

from __future__ import annotations

import argparse
import json

from cellama.bench.harness.engines import CORES, model_path
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import LLAMA_SERVER, program

from . import at_once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=160, help="all at once")
    parser.add_argument("--chats", type=int, default=0, help="conversations of several turns among them")
    parser.add_argument("--turns", type=int, default=4, help="requests of a chat")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--rounds", type=int, default=1, help="of everything at once, in turns; medians are shown")
    parser.add_argument("--ours", nargs="+", choices=list(at_once.OURS), default=list(at_once.OURS), help="our ways")
    parser.add_argument("--slots", type=int, default=64, help="of our side, unless --options names others")
    parser.add_argument("--options", type=json.loads, default={}, help="engine options of our side, as JSON")
    parser.add_argument("--server-slots", type=int, nargs="*", default=[16, 32, 64], help="the -np of llama-server")
    parser.add_argument("--threads", type=int, default=CORES, help="of every side")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    args.slots = args.options.get("n_parallel", args.slots)
    path, server = model_path(args.model), program(LLAMA_SERVER)
    found = at_once.measure(path, server, args)
    ratios = found.ratios()
    caveats = [
        "Clients run beside what they ask, on the same cores. Ratios are of rates: above 1 we are faster. The start of "
        "the command `cellama batch run` is in its time, those of servers and workers are not.",
        "Full passes: each different prefix once at the rate of full prefill steps, and all generated tokens but the "
        "first of each request at the rate of full decode steps, of the same engine (load/full_passes.py).",
    ]
    return Report(found.rows(), ratios, at_once.targets(ratios), caveats)

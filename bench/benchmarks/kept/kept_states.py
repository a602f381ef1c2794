"""KV states on disk: what they save, and what they cost those who do not need them (docs/adr/014-kept-states.md).

`first`: the time to the first token of a long prompt, cold, from RAM, after a restart of the process, in another one.
`chats`: conversations of four turns, of which RAM holds a tenth, with a folder and without, and at llama-server.
`gaps`: those of a stream while 1 GB of states is written. `load`: the rate of requests that share nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from cellama.bench.harness.engines import model_path
from cellama.bench.harness.report import Report

from . import beside, chats, restarts

PARTS: dict[str, Callable[[Path, argparse.Namespace], Report]] = {
    "first": restarts.measure,
    "chats": chats.measure,
    "gaps": beside.measure_gaps,
    "load": beside.measure_load,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompt", type=int, default=1900, help="tokens of a long prompt")
    parser.add_argument("--samples", type=int, default=3, help="long prompts in each tier")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--in-ram", type=int, default=20, help="conversations that RAM has room for")
    parser.add_argument("--opening", type=int, default=160, help="tokens of a conversation's first prompt")
    parser.add_argument("--message", type=int, default=32, help="tokens of a later message")
    parser.add_argument("--new", type=int, default=4, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rate", type=float, default=6.0, help="turns that come per second")
    parser.add_argument("--states", type=int, default=24, help="long prompts whose states are written beside a stream")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the stream before and after that")
    parser.add_argument("--requests", type=int, default=32, help="of the load that shares nothing")
    parser.add_argument("--rounds", type=int, default=3, help="of the stream and of the load")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    parts = [PARTS[name](path, args) for name in args.parts]
    return Report(
        [row for part in parts for row in part.rows],
        {name: ratio for part in parts for name, ratio in part.ratios.items()},
        {name: hoped for part in parts for name, hoped in part.targets.items()},
        [caveat for part in parts for caveat in part.caveats],
    )

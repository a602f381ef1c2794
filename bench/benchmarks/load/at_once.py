"""Send a mixed load all at once to cellama in three ways, and to llama-server with several slot counts."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cellama.bench.harness.engines import context
from cellama.bench.harness.mixed_load import LoadShape, Sizes, conversations, flat, sizes
from cellama.bench.harness.workloads import write_lines
from cellama.bench.peers.offline_peers import TimedFile, llama_server

from . import ours

PART = "at once"
OURS = {"engine": "engine alone", "jobs": "jobs through the queue", "batch": "cellama batch run"}
SERVER = "llama-server"
TARGET = ">= 1.4"  # times the requests per second of the best llama-server


@dataclass
class AtOnce:
    """The measurements of all variants. Each variant runs once per round, and figures are medians of the rounds."""

    load: Sizes
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by variant
    computed: dict[str, int] = field(default_factory=dict)  # prompt tokens, in the last round
    slots: dict[str, int] = field(default_factory=dict)

    def note(self, who: str, slots: int, outcome: TimedFile) -> None:
        self.seconds.setdefault(who, []).append(outcome.seconds)
        self.computed[who], self.slots[who] = outcome.num_computed, slots
        print(f"{who}: {outcome.num_lines} requests in {outcome.seconds:.1f} s", flush=True)

    @property
    def best_server(self) -> str | None:
        """Return the fastest configuration of llama-server."""
        tried = [who for who in self.seconds if who.startswith(SERVER)]
        return min(tried, key=lambda who: median(self.seconds[who]), default=None)

    def requests_per_s(self, who: str) -> float:
        return self.load.requests / median(self.seconds[who])

    def rows(self) -> list[dict[str, Any]]:
        return [self._row(who, median(seconds)) for who, seconds in self.seconds.items()]

    def _row(self, who: str, seconds: float) -> dict[str, Any]:
        row = {"part": PART, "who": who, "slots": self.slots[who], "seconds": seconds}
        row |= {"requests/s": self.load.requests / seconds, "new tok/s": self.load.new_tokens / seconds}
        return {**row, "prefilled": self.computed[who], "over optimum": self.computed[who] / self.load.trie_tokens}

    def ratios(self) -> dict[str, float]:
        """Return the ratios of cellama's rates to llama-server's best rate."""
        best = self.best_server
        if best is None:
            return {}
        ways = [who for who in OURS.values() if who in self.seconds]
        theirs = self.requests_per_s(best)
        return {f"{PART}: {who} over the best llama-server": self.requests_per_s(who) / theirs for who in ways}


def options_of(args: argparse.Namespace, longest: int) -> dict[str, Any]:
    """Return cellama's engine options, with enough cells for the longest request in each slot."""
    options = {"n_parallel": args.slots, "ctx_per_slot": room(longest), "kv_layout": "partitioned", "n_batch": 2048}
    return {**options, "n_ubatch": 512, "threads": args.threads, **args.options}


def room(longest: int) -> int:
    """Return the context size per slot, in tokens, which is the same for all servers."""
    return context(1, longest, 1)


def measure(path: Path, server: Path | None, args: argparse.Namespace) -> AtOnce:
    """Run every variant `args.rounds` times, alternating between variants."""
    lines = flat(conversations(LoadShape(args.requests, args.chats, args.turns, args.scale), seed=args.seed))
    found = AtOnce(sizes(lines))
    longest = found.load.longest
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "lines.jsonl"), Path(folder, "out.jsonl")
        write_lines(source, lines)
        options = options_of(args, longest)
        ways: dict[str, tuple[int, Callable[[], TimedFile]]] = {
            OURS[name]: (args.slots, partial(getattr(ours, name), path, source, target, options)) for name in args.ours
        }
        if server:
            for slots in args.server_slots:
                size = room(longest)
                asked = partial(llama_server, server, path, source, target, slots, size, args.threads, len(lines))
                ways[f"{SERVER} -np {slots}"] = slots, asked
        for _ in range(args.rounds):
            for who, (slots, run) in ways.items():
                found.note(who, slots, run())
    return found

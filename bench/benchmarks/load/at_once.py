"""A mixed load all at once, from file to file: our three ways, llama-server, and what full passes would take."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cellama.bench.benchmarks.bulk import offline_ours as ours
from cellama.bench.harness.mixed_load import Shape, Sizes, conversations, flat, sizes
from cellama.bench.harness.workloads import Line, write_lines
from cellama.bench.peers.offline_peers import Outcome, llama_server
from cellama.engine.memory.context_size import STREAM_PADDING

from . import full_passes

PART = "at once"
OURS = {"engine": "engine alone", "jobs": "jobs through the queue", "batch": "cellama batch run"}
FULL, SERVER = "full passes (computed)", "llama-server"
OVER_SERVER, OVER_FULL = ">= 1.4", ">= 0.9"


@dataclass
class AtOnce:
    """What was measured. Every way runs once in each round; figures are medians of the rounds."""

    load: Sizes
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by way
    computed: dict[str, int] = field(default_factory=dict)  # prompt tokens, in the last round
    slots: dict[str, int] = field(default_factory=dict)

    def note(self, who: str, slots: int, outcome: Outcome) -> None:
        self.seconds.setdefault(who, []).append(outcome.seconds)
        self.computed[who], self.slots[who] = outcome.num_computed, slots
        print(f"{who}: {outcome.num_lines} requests in {outcome.seconds:.1f} s", flush=True)

    @property
    def best_server(self) -> str | None:
        """The fastest of llama-server's ways."""
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
        """Rates of each of our ways over those of others."""
        ways, others = [who for who in OURS.values() if who in self.seconds], [FULL]
        if self.best_server:
            others.append(self.best_server)
        by = {who: "the best llama-server" if who == self.best_server else "full passes" for who in others}
        return {
            f"{PART}: {who} over {by[other]}": median(self.seconds[other]) / median(self.seconds[who])
            for other in others
            for who in ways
        }


def targets(ratios: Mapping[str, float]) -> dict[str, str]:
    """What is hoped for of these."""
    return {name: OVER_FULL if name.endswith("full passes") else OVER_SERVER for name in ratios}


def options_of(args: argparse.Namespace, longest: int) -> dict[str, Any]:
    """Engine options of our side, with cells for the longest request in each slot."""
    options = {"n_parallel": args.slots, "ctx_per_slot": room(longest), "kv_layout": "partitioned", "n_batch": 2048}
    return {**options, "n_ubatch": 512, "threads": args.threads, **args.options}


def room(longest: int) -> int:
    """Tokens of a slot, for both sides."""
    return -(-(longest + 1) // STREAM_PADDING) * STREAM_PADDING


def measure(path: Path, server: Path | None, args: argparse.Namespace) -> AtOnce:
    """Runs every way `args.rounds` times, in turns."""
    lines = flat(conversations(Shape(args.requests, args.chats, args.turns, args.scale), seed=args.seed))
    found = AtOnce(sizes(lines))
    with tempfile.TemporaryDirectory() as folder:
        ways = _ways(path, server, args, lines, Path(folder))
        for _ in range(args.rounds):
            for who, (slots, run) in ways.items():
                found.note(who, slots, run())
            found.note(FULL, args.slots, _full(path, args, found.load))
    return found


def _ways(
    path: Path, server: Path | None, args: argparse.Namespace, lines: list[Line], folder: Path
) -> dict[str, tuple[int, Callable[[], Outcome]]]:
    """Name → slots and what runs it."""
    source, target, load = folder / "lines.jsonl", folder / "out.jsonl", sizes(lines)
    write_lines(source, lines)
    options = options_of(args, load.longest)
    ways: dict[str, tuple[int, Callable[[], Outcome]]] = {
        OURS[name]: (args.slots, partial(getattr(ours, name), path, source, target, options)) for name in args.ours
    }
    if server is None:
        return ways
    for slots in args.server_slots:
        asked = partial(llama_server, server, path, source, target, slots, room(load.longest), args.threads, len(lines))
        ways[f"{SERVER} -np {slots}"] = slots, asked
    return ways


def _full(path: Path, args: argparse.Namespace, load: Sizes) -> Outcome:
    rates = full_passes.measure(path, load, options_of(args, load.longest), args.seed)
    print(f"full passes: {rates.decode:.0f} tokens/s decoding, {rates.prefill:.0f} reading", flush=True)
    return Outcome(load.requests, rates.seconds(load), load.trie_tokens)

"""Compare bulk runs of cellama, llama-server and a naive Celery task, with and without shared prefixes.

All variants run one after another on the same machine, and process the same lines. Prompts are token ids, and sampling
is greedy with a fixed number of tokens. llama-server runs both with its defaults and with the value of -np that was
fastest for --try-lines lines.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import CORES, context, model_path
from cellama.bench.harness.report import Report
from cellama.bench.harness.workloads import Line, families, independent, trie_optimum, write_lines
from cellama.bench.peers import offline_peers as peers
from cellama.bench.peers.offline_peers import TimedFile
from cellama.bench.peers.programs import BATCHED_BENCH, LLAMA_SERVER, program

from . import ours

WORKLOADS = ("independent", "families")
OURS = {"batch": "cellama batch run", "engine": "engine alone, order of the file", "jobs": "a job per line"}
SERVER, BEST_SERVER, NAIVE = "llama-server, its defaults", "llama-server, its best -np", "naive Celery task"
TARGETS = {"independent": {BEST_SERVER: 1.05, NAIVE: 2.0}, "families": {BEST_SERVER: 2.0, NAIVE: 3.0}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--ours", nargs="+", choices=list(OURS), default=["batch", "engine"], help="variants of cellama to measure"
    )
    parser.add_argument("--lines", type=int, default=2000, help="number of lines per workload")
    parser.add_argument(
        "--prompt", type=int, default=128, help="number of prompt tokens per line, for lines without a shared prefix"
    )
    parser.add_argument(
        "--shared-prompt", type=int, default=384, help="number of prompt tokens per line, for lines that share a prefix"
    )
    parser.add_argument("--shared", type=int, default=320, help="number of tokens in a shared prefix")
    parser.add_argument("--families", type=int, default=20)
    parser.add_argument("--new", type=int, default=64, help="number of tokens to generate per line")
    parser.add_argument("--slots", type=int, default=64, help="number of cellama slots, unless set by --options")
    parser.add_argument("--options", type=json.loads, default={}, help="engine options for cellama, as JSON")
    parser.add_argument(
        "--server-slots", type=int, nargs="*", default=[16, 32, 64], help="values of -np to try for llama-server"
    )
    parser.add_argument("--try-lines", type=int, default=256, help="number of lines to run for each value of -np")
    parser.add_argument(
        "--naive-lines", type=int, default=0, help="number of lines for the naive Celery task (0: all lines)"
    )
    parser.add_argument("--naive-processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=CORES, help="number of threads per server")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    found = [_Workload(name, args) for name in args.workloads]
    with tempfile.TemporaryDirectory() as folder:
        for workload in found:
            workload.run(Path(folder))
    ratios = {key: value for workload in found for key, value in workload.ratios().items()}
    targets = {key: value for workload in found for key, value in workload.targets().items() if key in ratios}
    caveats = [
        "Times include the start of the command `cellama batch run`, but not the start of servers and workers.",
        "Clients and servers share the cores. Ratios compare lines per second.",
    ]
    return Report([row for workload in found for row in workload.rows], ratios, targets, caveats)


class _Workload:
    """A workload and its measurements."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self._name, self._args, self._path = name, args, model_path(args.model)
        self._length = args.prompt if name == "independent" else args.shared_prompt
        self._lines = self._make(args)
        self._outcomes: dict[str, TimedFile] = {}
        self.rows: list[dict[str, Any]] = []

    def _make(self, args: argparse.Namespace) -> list[Line]:
        if self._name == "independent":
            return independent(args.lines, self._length, args.new, seed=args.seed)
        return families(
            args.lines, self._length, args.new, shared=args.shared, num_families=args.families, seed=args.seed
        )

    def run(self, folder: Path) -> None:
        """Run all variants one after another."""
        args, source, target = self._args, folder / f"{self._name}.jsonl", folder / f"{self._name}.out.jsonl"
        write_lines(source, self._lines)
        size = self._length + args.new
        options = {"n_parallel": args.slots, "n_ctx": context(args.slots, self._length, args.new)}
        options |= {
            "kv_layout": "partitioned",
            "n_batch": 2048,
            "n_ubatch": 512,
            "threads": args.threads,
            **args.options,
        }
        for way in args.ours:
            self._note(OURS[way], getattr(ours, way)(self._path, source, target, options), self._lines)
        if server := program(LLAMA_SERVER):
            self._note(
                SERVER, peers.llama_server(server, self._path, source, target, 0, size, args.threads), self._lines
            )
            self._best_server(server, source, target)
        some, room = self._lines[: args.naive_lines or None], context(1, size, 0)
        write_lines(source, some)
        outcome = peers.naive_celery(self._path, source, target, args.naive_processes, room, args.threads)
        self._note(NAIVE, outcome, some)
        if bench := program(BATCHED_BENCH):
            optimum = trie_optimum(line.prompt for line in self._lines)
            limit = peers.limit(bench, self._path, self._lines, optimum, args.slots, args.threads)
            self._note("limit, from llama-batched-bench's rates", limit, self._lines)

    def _best_server(self, server: Path, source: Path, target: Path) -> None:
        args, sizes, size = self._args, self._args.server_slots, context(1, self._length, self._args.new)
        if not sizes:
            return
        some = source.with_suffix(".some.jsonl")
        write_lines(some, self._lines[: args.try_lines])
        tried = {
            slots: peers.llama_server(server, self._path, some, target, slots, size, args.threads) for slots in sizes
        }
        best = min(tried, key=lambda slots: tried[slots].seconds)
        outcome = peers.llama_server(server, self._path, source, target, best, size, args.threads)
        self._note(BEST_SERVER, outcome, self._lines, f" ({best})")

    def _note(self, who: str, outcome: TimedFile, lines: Sequence[Line], more: str = "") -> None:
        if outcome.num_lines != len(lines):
            raise RuntimeError(f"{who} returned {outcome.num_lines} results for {len(lines)} lines")
        self._outcomes[who] = outcome
        optimum = trie_optimum(line.prompt for line in lines)
        row = {"workload": self._name, "who": who + more, "lines": len(lines), "seconds": outcome.seconds}
        row |= {"lines/s": outcome.num_lines / outcome.seconds, "prefilled": outcome.num_computed}
        self.rows.append({**row, "over optimum": outcome.num_computed / optimum})
        print(f"{self._name}: {who}{more}: {outcome.num_lines} lines in {outcome.seconds:.1f} s", flush=True)

    def _rate(self, who: str) -> float:
        return self._outcomes[who].num_lines / self._outcomes[who].seconds

    def ratios(self) -> dict[str, float]:
        """Compare cellama's first variant with the rates of all other variants, and with the optimal prefill."""
        first = next((OURS[way] for way in self._args.ours if OURS[way] in self._outcomes), None)
        if first is None:
            return {}
        others = [who for who in self._outcomes if who != first]
        ratios = {f"{self._name}: over {who}": self._rate(first) / self._rate(who) for who in others}
        optimum = trie_optimum(line.prompt for line in self._lines)
        return {**ratios, f"{self._name}: prefilled over the optimum": self._outcomes[first].num_computed / optimum}

    def targets(self) -> dict[str, str]:
        """Return the target ratios."""
        by_peer = TARGETS[self._name]
        targets = {f"{self._name}: over {who}": f">= {ratio:g}" for who, ratio in by_peer.items()}
        targets[f"{self._name}: over {SERVER}"] = f">= {by_peer[BEST_SERVER]:g}"
        if self._name == "independent":
            targets[f"{self._name}: over {OURS['engine']}"] = ">= 0.95"
        return {**targets, f"{self._name}: prefilled over the optimum": "<= 1.05"}

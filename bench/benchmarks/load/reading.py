"""Prompts read in one decode call, against one after another: what reading together can gain (ADR 011)."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median
from typing import Any

from cellama.bench.harness.engines import CORES, FIRST_WORD, LAST_WORD, model_path
from cellama.bench.harness.report import Report
from cellama.engine import EngineOptions
from cellama.engine.backend import Chunk
from cellama.engine.llama import LlamaBackend, LlamaModel

APART = 2  # slots between prompts that are not side by side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, default=96, help="tokens of equal prompts; of mixed ones in the mean")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2, 4], help="how many are read together")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)


def mixed(length: int, count: int) -> list[int]:
    """Different lengths with that mean."""
    step = length // (count + 1)
    return [length + step * (2 * index - count + 1) // 2 for index in range(count)]


def run(args: argparse.Namespace) -> Report:
    most = max(args.prompts)
    options = EngineOptions(
        n_parallel=args.slots, ctx_per_slot=2 * most * args.length, kv_layout="partitioned", threads=CORES
    )
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with closing(LlamaModel(model_path(args.model))) as model, closing(LlamaBackend(model, options)) as backend:
        reader = _Reader(backend, args.seed)
        for count in args.prompts:
            equal, different = [args.length] * count, mixed(args.length, count)
            ways: dict[str, list[list[tuple[int, int]]]] = {
                "equal, side by side": [list(enumerate(equal))],
                "equal, holes between": [[(APART * slot, length) for slot, length in enumerate(equal)]],
                "equal, one after another": [[(slot, length)] for slot, length in enumerate(equal)],
                "mixed, side by side": [list(enumerate(different))],
                "mixed, one after another": [[(slot, length)] for slot, length in enumerate(different)],
            }
            seconds = reader.medians(ways, args.rounds)
            for name, calls in ways.items():
                tokens = sum(length for call in calls for _, length in call)
                rows.append({"prompts": count, "way": name, "tokens": tokens, "ms": seconds[name] * 1e3})
                rows[-1]["tok/s"] = tokens / seconds[name]
            for lengths in ("equal", "mixed"):
                ratios[f"{count} {lengths}: together over one after another, rate"] = (
                    seconds[f"{lengths}, one after another"] / seconds[f"{lengths}, side by side"]
                )
    return Report(
        rows,
        ratios,
        caveats=["Decode calls of the backend alone, nothing beside them; all ways in turns, medians. Empty slots."],
    )


class _Reader:
    def __init__(self, backend: LlamaBackend, seed: int) -> None:
        self._backend = backend
        self._rng = random.Random(seed)

    def medians(self, ways: dict[str, list[list[tuple[int, int]]]], rounds: int) -> dict[str, float]:
        """Seconds of each way: decode calls, each of slots with so many tokens."""
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, calls in ways.items():
                taken[name].append(sum(self._seconds(call) for call in calls))
                for slot in {slot for call in calls for slot, _ in call}:
                    self._backend.trim(slot, 0)
        return {name: median(seconds) for name, seconds in taken.items()}

    def _seconds(self, call: Sequence[tuple[int, int]]) -> float:
        chunks = [
            Chunk(slot, 0, [self._rng.randrange(FIRST_WORD, LAST_WORD) for _ in range(length)], samples=True)
            for slot, length in call
        ]
        started = time.monotonic()
        self._backend.decode(chunks)
        return time.monotonic() - started

"""Two models are loaded at once while a third one streams: how long its longest gap between tokens is."""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from statistics import median
from typing import Any

from cellama.bench.harness.engines import CORES, GREEDY, model_path, random_prompts
from cellama.bench.harness.report import Report
from cellama.engine import EngineOptions, Event, Handle, Model, ModelManager, Request, Text

WARM_UP_TOKENS = 8
SWITCH_INTERVAL_S = 0.0005  # as in a worker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="times that both are loaded and unloaded")
    parser.add_argument("--tokens", type=int, default=100, help="of the stream before each load")
    parser.add_argument("--threads", type=int, default=CORES, help="of the model that streams")
    parser.add_argument("--seed", type=int, default=0)


class Stream:
    """A long generation and the times of its tokens."""

    def __init__(self, model: Model, prompt: list[int]) -> None:
        self.times: list[float] = []
        self._changed = threading.Condition()
        request = Request("stream", tuple(prompt), GREEDY, max_tokens=100_000, ignore_eos=True)
        self.handle = model.engine.submit(request, self._note)
        self.handle.add_done_callback(self._end)

    def _note(self, event: Event) -> None:
        if isinstance(event, Text):
            with self._changed:
                self.times.append(time.monotonic())
                self._changed.notify()

    def _end(self, _: Handle) -> None:
        with self._changed:
            self._changed.notify()

    def wait_for(self, count: int) -> None:
        """Until it has so many tokens, or ended."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.times) >= count or self.handle.done)

    def gaps_ms(self, since: float, until: float) -> list[float]:
        """The gaps between tokens that overlap with a span of time."""
        times = list(self.times)
        return [(b - a) * 1e3 for a, b in itertools.pairwise(times) if b > since and a < until]


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    manager = ModelManager()
    rows: list[dict[str, Any]] = []
    try:
        options = EngineOptions(threads=args.threads, n_parallel=2, ctx_per_slot=16384)
        model = manager.load("stream", str(path), options=options, capabilities=["generate"])
        stream = Stream(model, random_prompts(1, 32, seed=args.seed)[0])
        stream.wait_for(WARM_UP_TOKENS)
        for _ in range(args.rounds):
            started = time.monotonic()
            stream.wait_for(len(stream.times) + args.tokens)
            alone = stream.gaps_ms(started, time.monotonic())
            rows.append(_row(alone, _gaps_while_loading(manager, stream, str(path))))
        stream.handle.cancel()
    finally:
        manager.close()
    worst = [row["worst over usual"] for row in rows]
    ratios = {"worst gap over usual gap": max(worst), "of the median round": median(worst)}
    caveats = [
        "the model that streams has all cores when nothing is loaded; its usual gap is that of the tokens before"
    ]
    return Report(rows, ratios, {"worst gap over usual gap": "<= 3"}, caveats)


def _gaps_while_loading(manager: ModelManager, stream: Stream, path: str) -> list[float]:
    options = EngineOptions(threads=1, n_parallel=8, ctx_per_slot=1024)
    started = time.monotonic()
    loads = [
        manager.load_in_background("big", path, options=options, capabilities=["generate"]),
        manager.load_in_background("tiny", "bundled://tiny", options=options),
    ]
    for load in loads:
        load.result()
    ended = time.monotonic()
    stream.wait_for(len(stream.times) + 1)  # so that the gap that is open now counts
    gaps = stream.gaps_ms(started, ended)
    for model_id in ("big", "tiny"):
        manager.unload(model_id)
    return gaps


def _row(alone: list[float], loading: list[float]) -> dict[str, Any]:
    return {
        "usual ms": median(alone),
        "worst alone ms": max(alone),
        "tokens while loading": len(loading),
        "median ms": median(loading),
        "worst ms": max(loading),
        "worst over usual": max(loading) / median(alone),
    }

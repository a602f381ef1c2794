"""What tokenizing costs: alone, over threads, and beside the generation that follows, for more and more callers.

Callers with text tokenize in their own threads while the engine computes; callers with tokens have done so before.
Both kinds take turns, so that neither has the quieter machine.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

from cellama.bench.harness.engines import loaded, model_path, percentile, warm_up
from cellama.bench.harness.report import Report
from cellama.engine import Model

Call = Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=256, help="words")
    parser.add_argument("--repeats", type=int, default=200, help="of tokenizing alone")
    parser.add_argument("--threads", type=int, default=2, help="that tokenize at once")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 4, 8], help="that generate at once")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--new", type=int, default=8, help="tokens of each call")
    parser.add_argument("--rounds", type=int, default=3, help="in which each caller calls once, with text and tokens")


def run(args: argparse.Namespace) -> Report:
    with loaded(model_path(args.model), n_parallel=args.slots, ctx_per_slot=4096) as model:
        warm_up(model)
        text = " ".join(f"word{i} is said" for i in range(args.prompt // 3))
        tokens = model.tokenize(text)
        alone = _in_threads(lambda: model.tokenize(text), 1, args.repeats)
        parallel = _in_threads(lambda: model.tokenize(text), args.threads, args.repeats)
        back = _in_threads(lambda: model.detokenize(tokens), 1, args.repeats)
        rows: list[dict[str, Any]] = [
            {"what": f"tokenize {len(tokens)} tokens", "threads": 1, "ms": mean(alone)},
            {"what": "the same at once, per call", "threads": args.threads, "ms": mean(parallel) / args.threads},
            {"what": "detokenize", "threads": 1, "ms": mean(back)},
        ]
        ratios = {"speed-up by threads": mean(alone) * args.threads / mean(parallel)}
        for callers in args.callers:
            by_text, by_tokens = _side_by_side(model, text, tokens, callers, args)
            rows += [_row(callers, "text", by_text), _row(callers, "tokens", by_tokens)]
            ratios[f"text over tokens, {callers} callers"] = mean(by_text) / mean(by_tokens)
            ratios[f"tokenizing over generating, {callers} callers"] = mean(alone) / mean(by_text)
    return Report(rows, ratios, {name: "about 1" for name in ratios if name.startswith("text over")})


def _side_by_side(
    model: Model, text: str, tokens: list[int], callers: int, args: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Milliseconds of each call with text, and of each with tokens."""
    once = {"temperature": 0, "max_tokens": args.new, "ignore_eos": True, "cache_prompt": False}
    by_text: list[float] = []
    by_tokens: list[float] = []
    for _ in range(args.rounds):
        by_text += _in_threads(lambda: model.engine.generate(text, **once), callers, 1)
        by_tokens += _in_threads(lambda: model.engine.generate(tokens, **once), callers, 1)
    return by_text, by_tokens


def _row(callers: int, given: str, ms: list[float]) -> dict[str, Any]:
    times = {"average ms": mean(ms), "median ms": median(ms), "p95 ms": percentile(ms, 0.95)}
    return {"callers": callers, "generate from": given, **times}


def _in_threads(call: Call, num_threads: int, repeats: int) -> list[float]:
    """Milliseconds of each call, when so many threads call at once, each so often."""
    times: list[float] = []
    together = threading.Barrier(num_threads)

    def work() -> None:
        together.wait()
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times

"""Measure tokenization in one thread and in several threads, and during generation with increasing numbers of callers.

Callers that send text tokenize it in their own threads while the engine computes. Callers that send tokens have
tokenized their prompts beforehand. Both kinds of calls alternate with calls to llama-server over HTTP, so noise affects
all of them equally.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

from cellama.bench.harness.engines import CORES, loaded, model_path, percentile, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import LlamaServer, llama_server
from cellama.engine import Model

Call = Callable[[], object]
OURS, SERVER = "engine", "llama-server"
TEXT, TOKENS = "text", "tokens"
TOKENS_PER_WORD = 7  # upper limit for the words that this benchmark makes up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=256, help="number of words per prompt")
    parser.add_argument("--repeats", type=int, default=200, help="number of tokenize-only calls")
    parser.add_argument("--threads", type=int, default=2, help="number of callers that tokenize concurrently")
    parser.add_argument(
        "--callers",
        type=int,
        nargs="+",
        default=[1, 4, 8],
        help="numbers of concurrent callers to measure during generation",
    )
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--new", type=int, default=8, help="number of tokens to generate per call")
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="number of rounds; each caller sends text and tokens once per round",
    )


def run(args: argparse.Namespace) -> Report:
    path, size = model_path(args.model), TOKENS_PER_WORD * args.prompt + args.new
    with (
        loaded(path, n_parallel=args.slots, ctx_per_slot=size) as model,
        llama_server(path, args.slots, size, CORES) as server,
    ):
        warm_up(model)
        text = " ".join(f"word{i} is said" for i in range(args.prompt // 3))
        tokens = model.tokenize(text)
        alone = _in_threads(lambda: model.tokenize(text), 1, args.repeats)
        parallel = _in_threads(lambda: model.tokenize(text), args.threads, args.repeats)
        back = _in_threads(lambda: model.detokenize(tokens), 1, args.repeats)
        rows: list[dict[str, Any]] = [
            {"what": f"tokenize {len(tokens)} tokens", "threads": 1, "ms": mean(alone)},
            {"what": "tokenize concurrently, per call", "threads": args.threads, "ms": mean(parallel) / args.threads},
            {"what": "detokenize", "threads": 1, "ms": mean(back)},
        ]
        if server:
            asked = _in_threads(lambda: server.tokenize(text), 1, args.repeats)
            rows.append({"what": "tokenize, llama-server over HTTP", "threads": 1, "ms": mean(asked)})
        ratios = {"speed-up by threads": mean(alone) * args.threads / mean(parallel)}
        for callers in args.callers:
            times = _side_by_side(_ways(model, server, text, tokens, args.new), callers, args.rounds)
            rows += [_row(callers, who, given, ms) for (who, given), ms in times.items()]
            ratios |= _ratios(f"{callers} callers", {way: mean(ms) for way, ms in times.items()}, mean(alone))
    return Report(rows, ratios, {name: "about 1" for name in ratios if "text over" in name})


def _ways(
    model: Model, server: LlamaServer | None, text: str, tokens: list[int], num_new: int
) -> dict[tuple[str, str], Call]:
    """Return functions that generate text, one for each server and kind of input."""
    once = {"temperature": 0, "max_tokens": num_new, "ignore_eos": True, "cache_prompt": False}
    ways: dict[tuple[str, str], Call] = {
        (OURS, TEXT): lambda: model.engine.generate(text, **once),
        (OURS, TOKENS): lambda: model.engine.generate(tokens, **once),
    }
    if server is not None:
        ways[SERVER, TEXT] = lambda: server.complete(text, num_new, cache_prompt=False)
        ways[SERVER, TOKENS] = lambda: server.complete(tokens, num_new, cache_prompt=False)
    return ways


def _side_by_side(ways: dict[tuple[str, str], Call], callers: int, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Call the functions in turn, and return the duration of each call in milliseconds."""
    times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            times[way] += _in_threads(call, callers, 1)
    return times


def _ratios(name: str, means: dict[tuple[str, str], float], alone: float) -> dict[str, float]:
    ratios = {
        f"{name}: text over tokens": means[OURS, TEXT] / means[OURS, TOKENS],
        f"{name}: tokenizing over generating": alone / means[OURS, TEXT],
    }
    if (SERVER, TEXT) in means:
        ratios[f"{name}: text over tokens, llama-server"] = means[SERVER, TEXT] / means[SERVER, TOKENS]
        ratios[f"{name}: from text, llama-server's time over ours"] = means[SERVER, TEXT] / means[OURS, TEXT]
    return ratios


def _row(callers: int, who: str, given: str, ms: list[float]) -> dict[str, Any]:
    times = {"average ms": mean(ms), "median ms": median(ms), "p95 ms": percentile(ms, 0.95)}
    return {"callers": callers, "who": who, "generate from": given, **times}


def _in_threads(call: Call, num_threads: int, repeats: int) -> list[float]:
    """Return the duration of each call in milliseconds while `num_threads` threads call concurrently."""
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

"""Measure single requests: the time to first token for several prompt lengths, and the decode rate.

Requests to the engine alternate with requests to a llama-server that has one slot. The client measures all times. The
client calls the engine directly, and the server over HTTP.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from cellama.bench.harness.engines import CORES, loaded, model_path, random_prompts, run_all, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import Reply, llama_server
from cellama.engine import Completion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 128, 512, 1024], help="prompt lengths in tokens")
    parser.add_argument("--new", type=int, default=64, help="number of tokens to generate per request")
    parser.add_argument("--samples", type=int, default=3)


def run(args: argparse.Namespace) -> Report:
    path, longest = model_path(args.model), max(args.prompts) + args.new
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with loaded(path, n_parallel=1, ctx_per_slot=longest) as model, llama_server(path, 1, longest, CORES) as server:
        warm_up(model)
        for length in args.prompts:
            ours, theirs = [], []
            for number in range(args.samples):
                prompts = random_prompts(1, length, seed=number)
                ours += run_all(model, prompts, args.new)[1]
                theirs += [server.complete(prompts[0], args.new)] if server else []
            rows.append(_row("engine", length, *_of_engine(ours)))
            if theirs:
                rows.append(_row("llama-server", length, *_of_server(theirs)))
                ratios |= _ratios(*rows[-2:])
    return Report(rows, ratios, dict.fromkeys(ratios, ">= 1.0"))


def _of_engine(done: Sequence[Completion]) -> tuple[float, float, float]:
    """Return the medians of the time to first token in ms, the rate in tokens per second, and the total time in ms."""
    times = [completion.timings for completion in done]
    return (
        median(one.ttft_ms or 0.0 for one in times),
        median(one.generation_rate or 0.0 for one in times),
        median(one.duration_ms for one in times),
    )


def _of_server(replies: Sequence[Reply]) -> tuple[float, float, float]:
    """Return llama-server's median time to first token, rate and total time, in the same units as `_of_engine`."""
    rate = median(reply.generation_rate for reply in replies)
    return median(reply.ttft_s for reply in replies) * 1e3, rate, median(reply.total_s for reply in replies) * 1e3


def _row(who: str, length: int, ttft_ms: float, rate: float, total_ms: float) -> dict[str, Any]:
    row = {"prompt": length, "who": who, "ttft ms": ttft_ms, "prefill t/s": length / ttft_ms * 1e3}
    return {**row, "decode t/s": rate, "total ms": total_ms}


def _ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of llama-server's times to cellama's times, and of cellama's rate to llama-server's rate."""
    name = f"{ours['prompt']} tokens: "
    return {
        name + "first token, llama-server over ours": theirs["ttft ms"] / ours["ttft ms"],
        name + "decode rate, ours over llama-server": ours["decode t/s"] / theirs["decode t/s"],
    }

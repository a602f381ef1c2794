"""Compare rate and time to first token with llama-server, for increasing numbers of concurrent callers.

Calls alternate between the engine and the server, which have the same number of slots. Each request has its own thread,
which calls the engine directly or the server over HTTP.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from cellama.bench.harness.engines import CORES, loaded, model_path, percentile, random_prompts, run_all, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import llama_server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="number of tokens per prompt")
    parser.add_argument("--new", type=int, default=48, help="number of tokens to generate per request")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path, size = model_path(args.model), args.prompt + args.new
    rows: list[dict[str, Any]] = []
    with (
        loaded(path, n_parallel=args.slots, ctx_per_slot=size) as model,
        llama_server(path, args.slots, size, CORES) as server,
    ):
        warm_up(model)
        for callers in args.callers:
            prompts = random_prompts(callers, args.prompt, seed=args.seed + callers)
            seconds, done = run_all(model, prompts, args.new)
            ttft = [completion.timings.ttft_ms or 0.0 for completion in done]
            rows.append({"callers": callers, **_figures("", callers * args.new, seconds, ttft), "seconds": seconds})
            if server:
                seconds, replies = server.complete_all(prompts, args.new)
                ttft = [reply.ttft_s * 1e3 for reply in replies]
                rows[-1] |= _figures("server's ", callers * args.new, seconds, ttft)
    ratios = {"rate of the last row over the first": rows[-1]["generated t/s"] / rows[0]["generated t/s"]}
    compared = {}
    if server:
        compared = {f"{row['callers']} callers: rate over llama-server": _over_server(row) for row in rows}
    return Report(rows, ratios | compared, dict.fromkeys(compared, ">= 1.0"))


def _figures(whose: str, num_tokens: int, seconds: float, ttft: Sequence[float]) -> dict[str, float]:
    return {
        f"{whose}generated t/s": num_tokens / seconds,
        f"{whose}ttft median ms": percentile(ttft, 0.5),
        f"{whose}ttft p95 ms": percentile(ttft, 0.95),
    }


def _over_server(row: dict[str, Any]) -> float:
    return float(row["generated t/s"] / row["server's generated t/s"])

"""Growing numbers of callers at once on one engine: rate, and how long the first token takes."""

from __future__ import annotations

import argparse

from cellama.bench.harness.engines import loaded, model_path, percentile, random_prompts, run_all, warm_up
from cellama.bench.harness.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--new", type=int, default=48, help="tokens")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    rows = []
    with loaded(model_path(args.model), n_parallel=args.slots, ctx_per_slot=args.prompt + args.new) as model:
        warm_up(model)
        for callers in args.callers:
            prompts = random_prompts(callers, args.prompt, seed=args.seed + callers)
            seconds, done = run_all(model, prompts, args.new)
            ttft = [completion.timings.ttft_ms or 0.0 for completion in done]
            rows.append(
                {
                    "callers": callers,
                    "generated t/s": callers * args.new / seconds,
                    "ttft median ms": percentile(ttft, 0.5),
                    "ttft p95 ms": percentile(ttft, 0.95),
                    "seconds": seconds,
                }
            )
    ratios = {"rate of the last row over the first": rows[-1]["generated t/s"] / rows[0]["generated t/s"]}
    return Report(rows, ratios)

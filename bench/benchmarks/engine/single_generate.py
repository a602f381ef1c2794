"""One request at a time: time to the first token by length of the prompt, and rate of what follows."""

from __future__ import annotations

import argparse
from statistics import median

from cellama.bench.harness.engines import loaded, model_path, random_prompts, run_all, warm_up
from cellama.bench.harness.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 128, 512, 1024], help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--samples", type=int, default=3)


def run(args: argparse.Namespace) -> Report:
    rows = []
    with loaded(model_path(args.model), n_parallel=1, ctx_per_slot=max(args.prompts) + args.new) as model:
        warm_up(model)
        for length in args.prompts:
            done = [run_all(model, random_prompts(1, length, seed=i), args.new)[1][0] for i in range(args.samples)]
            rows.append(
                {
                    "prompt": length,
                    "ttft ms": median(c.timings.ttft_ms or 0 for c in done),
                    "prefill t/s": median(c.timings.prompt_eval_rate or 0 for c in done),
                    "decode t/s": median(c.timings.generation_rate or 0 for c in done),
                    "total ms": median(c.timings.duration_ms for c in done),
                }
            )
    return Report(rows)

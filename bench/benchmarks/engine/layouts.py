"""Unified against partitioned KV cache by number of slots: what `kv_layout = "auto"` rests on (ADR 003)."""

from __future__ import annotations

import argparse
from pathlib import Path

from cellama.bench.harness.engines import loaded, model_path, random_prompts, run_all, warm_up
from cellama.bench.harness.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompt", type=int, default=384, help="tokens, of which 256 are shared in the second columns")
    parser.add_argument("--new", type=int, default=48, help="tokens")


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    rows = []
    for slots in args.slots:
        row: dict[str, float] = {"slots": slots}
        for shared in (0, 256):
            for layout in ("unified", "partitioned"):
                row[f"{layout} s, {shared} shared"] = _seconds(path, args, slots, layout, shared)
        rows.append(row)
    return Report(rows)


def _seconds(path: Path, args: argparse.Namespace, slots: int, layout: str, shared: int) -> float:
    prompts = random_prompts(slots * 2, args.prompt, shared=shared)
    with loaded(path, n_parallel=slots, ctx_per_slot=args.prompt + args.new, kv_layout=layout) as model:
        warm_up(model)
        return min(run_all(model, prompts, args.new, cache_scope=str(round_))[0] for round_ in range(2))

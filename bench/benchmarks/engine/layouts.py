"""Unified against partitioned KV cache by number of slots: what `kv_layout = "auto"` rests on (ADR 003).

With the most slots also types of keys and values: smaller ones save memory and take time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import loaded, model_path, random_prompts, run_all, warm_up
from cellama.bench.harness.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prompt", type=int, default=384, help="tokens, of which 256 are shared in the second columns")
    parser.add_argument("--new", type=int, default=48, help="tokens")
    parser.add_argument("--types", nargs="+", default=["f16", "q8_0"], help="of keys and values, over the first")


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    rows: list[dict[str, Any]] = []
    for slots in args.slots:
        row: dict[str, float] = {"slots": slots}
        for shared in (0, 256):
            for layout in ("unified", "partitioned"):
                row[f"{layout} s, {shared} shared"] = _seconds(path, args, slots, shared, kv_layout=layout)
        rows.append(row)
    seconds = {
        name: _seconds(path, args, max(args.slots), 0, cache_type_k=name, cache_type_v=name) for name in args.types
    }
    rows += [{"type": name, "slots": max(args.slots), "s, 0 shared": taken} for name, taken in seconds.items()]
    first, *others = args.types
    return Report(rows, {f"{name} over {first}, time": seconds[name] / seconds[first] for name in others})


def _seconds(path: Path, args: argparse.Namespace, slots: int, shared: int, **options: Any) -> float:
    prompts = random_prompts(slots * 2, args.prompt, shared=shared)
    with loaded(path, n_parallel=slots, ctx_per_slot=args.prompt + args.new, **options) as model:
        warm_up(model)
        return min(run_all(model, prompts, args.new, cache_scope=str(round_))[0] for round_ in range(2))

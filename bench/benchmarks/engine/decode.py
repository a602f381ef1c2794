"""Compare the engine's decode rate with its upper bound, the rate of llama-batched-bench, which only decodes."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from cellama.bench.harness.engines import CORES, context, loaded, model_path, random_prompts, run_all, steps_of, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import BATCHED_BENCH, batched_bench, program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=128, help="number of tokens per prompt")
    parser.add_argument("--new", type=int, default=64, help="number of tokens to generate per slot")
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace) -> Report:
    path, peer = model_path(args.model), program(BATCHED_BENCH)
    rows: list[dict[str, Any]] = []
    for slots in args.slots:
        ours, theirs = [], []
        for round_ in range(args.rounds):  # alternating, so that noise affects both equally
            ours.append(engine_rate(path, slots, args.prompt, args.new, round_))
            if peer:
                theirs.append(peer_rate(peer, path, slots, args.prompt, args.new))
        row = {"slots": slots, "engine t/s": median(ours), "batched-bench t/s": median(theirs) if peer else "-"}
        row["ratio"] = median(a / b for a, b in zip(ours, theirs, strict=True)) if peer else "-"
        rows.append(row)
    ratios = {f"{row['slots']} slots": row["ratio"] for row in rows if peer}
    return Report(
        rows,
        ratios,
        dict.fromkeys(ratios, ">= 0.97"),
        [
            "Only pure decode steps count. Rounds alternate between the programs, and medians are shown. The engine "
            "samples greedily, publishes events and updates its records. llama-batched-bench decodes random tokens and "
            "ignores logits.",
        ],
    )


def engine_rate(path: Path, slots: int, prompt: int, new: int, seed: int) -> float:
    with loaded(
        path, n_parallel=slots, n_ctx=context(slots, prompt, new), n_batch=2048, kv_layout="partitioned"
    ) as model:
        warm_up(model)
        with steps_of(model) as steps:
            run_all(model, random_prompts(slots, prompt, seed=seed), new)
        full = [step for step in steps if step.decode_tokens == slots and not step.prefill_tokens]
        return sum(step.decode_tokens for step in full) / sum(step.step_ms for step in full) * 1e3


def peer_rate(peer: Path, path: Path, slots: int, prompt: int, new: int) -> float:
    size = str(context(slots, prompt, new))
    found = batched_bench(
        peer, path, slots, prompt, new, "-c", size, "-b", "2048", "-ub", "512", "-no-kvu", "-t", str(CORES)
    )
    return float(found["speed_tg"])

"""Time of a step outside llama.cpp's decode, sampling included: its share, and its growth with context and queue."""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from cellama.bench.harness.engines import loaded, model_path, random_prompts, run_all, steps_of, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.harness.weightless import Crowd
from cellama.bench.models.synthetic import Shape, write_model

ROUNDS, STEPS = 8, 25  # of every crowd, in turn
CAVEAT = "Rows with `waiting` are processor time of Python alone: their decode calls compute nothing (fake backend)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1000, 10_000], help="requests")
    parser.add_argument("--crowd-slots", type=int, default=256, help="that are busy while others wait")
    parser.add_argument("--new", type=int, default=64, help="tokens")


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    rows = [_row("174M Q8_0", path, slots, 128, args.new) for slots in args.slots]
    with tempfile.TemporaryDirectory() as folder:
        # So small that 16k tokens are computed in no time: only Python's part is of interest.
        small = Path(folder) / "small.gguf"
        shape = Shape(
            n_embd=64, n_layer=2, n_head=2, n_head_kv=1, n_ff=64, n_vocab=50_000, n_ctx=max(args.contexts) + 256
        )
        write_model(small, shape, file_type="F16")
        rows += [_row("tiny F16", small, 1, context, args.new) for context in args.contexts]
    ratios = {f"share at {row['slots']} slots": row["share"] for row in rows[: len(args.slots)]}
    ratios["16k over 1k context"] = rows[-1]["python ms"] / rows[len(args.slots)]["python ms"]
    for families in (False, True):
        for ends in (False, True):
            crowds = _crowd_rows(args.crowd_slots, args.waiting, families, ends)
            name = f"{args.waiting[-1]} waiting over {args.waiting[0]}{', families' * families}{', ends' * ends}"
            ratios[name] = crowds[-1]["python ms"] / crowds[0]["python ms"]
            rows += crowds
    targets = {f"share at {slots} slots": "<= 0.03" for slots in args.slots if slots == 32}
    targets |= {name: "<= 1.5" for name in ratios if "waiting" in name}
    return Report(rows, ratios, {**targets, "16k over 1k context": "about 1"}, [CAVEAT])


def _row(name: str, path: Path, slots: int, context: int, new: int) -> dict[str, Any]:
    with loaded(path, n_parallel=slots, ctx_per_slot=context + new, n_batch=2048, kv_layout="partitioned") as model:
        warm_up(model)
        with steps_of(model) as steps:
            run_all(model, random_prompts(slots, context), new)
    full = [step for step in steps if step.decode_tokens == slots and not step.prefill_tokens]
    python_ms, step_ms = mean(step.python_ms for step in full), mean(step.step_ms for step in full)
    found = {"model": name, "slots": slots, "context": context, "step ms": step_ms, "python ms": python_ms}
    return {**found, "share": python_ms / step_ms, "waited ms": mean(step.wait_ms for step in full)}


def _crowd_rows(slots: int, waiting: list[int], families: bool, ends: bool) -> list[dict[str, Any]]:
    crowds = [Crowd(slots, number, families=families, ends=ends) for number in waiting]
    times: list[list[float]] = [[] for _ in crowds]
    gc.collect()
    for _ in range(ROUNDS):
        for crowd, own in zip(crowds, times, strict=True):
            crowd.step()  # its data are in the processor's caches again
            own += [crowd.step() for _ in range(STEPS)]
    kind = {"slots": slots, "families": families, "ends": ends}
    return [
        {**kind, "waiting": number, "python ms": median(own) * 1e3, "mean ms": mean(own) * 1e3}
        for number, own in zip(waiting, times, strict=True)
    ]

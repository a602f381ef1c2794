"""Decode steps while busy slots lie in patterns among idle ones, against as many side by side (ADR 008)."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from cellama.bench.harness.engines import GREEDY, loaded, model_path, random_prompts, steps_of, warm_up
from cellama.bench.harness.report import Report
from cellama.engine import Handle, Model, Request, StepStats

PATIENCE_S = 600
SIDE_BY_SIDE = "side by side"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--busy", type=int, nargs="+", default=[8, 16, 32, 48])
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--steps", type=int, default=24, help="decode steps that are measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)


def patterns(slots: int, busy: int, seed: int) -> dict[str, list[int]]:
    """Which slots are busy, under the name of each pattern."""
    stride = slots // busy
    found = {SIDE_BY_SIDE: list(range(busy))}
    if stride > 1:
        found[f"every {stride}th"] = list(range(0, busy * stride, stride))
        found["pairs"] = sorted(2 * stride * (i // 2) + i % 2 for i in range(busy))
    else:
        group = -(-slots // (slots - busy))  # so many side by side, then a hole
        found[f"{group - 1} of {group}"] = [slot for slot in range(slots) if slot % group != group - 1][:busy]
    found["random"] = sorted(random.Random(seed).sample(range(slots), busy))
    return found


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    context = args.prompt + _new_tokens(args)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    options = {"n_parallel": args.slots, "ctx_per_slot": context, "kv_layout": "partitioned"}
    with loaded(path, **options) as model:
        warm_up(model)
        for busy in args.busy:
            found = patterns(args.slots, busy, args.seed)
            on: dict[str, float] = {}
            off: dict[str, float] = {}
            for name, slots in found.items():
                on[name], off[name] = _milliseconds(model, args, slots)
            for name in found:
                ratio, plain = on[name] / on[SIDE_BY_SIDE], off[name] / off[SIDE_BY_SIDE]
                rows.append(
                    {"busy": busy, "pattern": name, "step ms": on[name], "ratio": ratio}
                    | {"left as they are, ms": off[name], "ratio of that": plain}
                )
                if name != SIDE_BY_SIDE:
                    ratios[f"{busy} {name}"] = ratio
    return Report(
        rows,
        ratios,
        dict.fromkeys(ratios, "<= 1.10"),
        [
            "Medians of pure decode steps, both columns in turns. All slots are busy first, then all but those of the "
            "pattern are cancelled and keep their cells. What moves take is in the steps that they come in.",
        ],
    )


def _milliseconds(model: Model, args: argparse.Namespace, slots: list[int]) -> tuple[float, float]:
    """A decode step with holes filled and closed, and with slots left as they are."""
    on: list[float] = []
    off: list[float] = []
    for round_ in range(args.rounds):
        on += _steps(model, args, slots, round_, is_active=True)
        off += _steps(model, args, slots, round_, is_active=False)
    return median(on), median(off)


def _steps(model: Model, args: argparse.Namespace, slots: list[int], round_: int, *, is_active: bool) -> list[float]:
    """Milliseconds of decode steps after all other slots have become idle."""
    layout = model.engine._core.scheduler.layout
    layout.is_active = False  # no sequence moves before the pattern is there
    prompts = random_prompts(args.slots, args.prompt, seed=round_)
    with steps_of(model) as steps:
        handles = [_submit(model, args, str(index), prompt) for index, prompt in enumerate(prompts)]
        _wait(handles, lambda: any(step.decode_tokens == args.slots for step in list(steps)))
        at = {holder.request.id: slot for slot, holder in enumerate(model.engine._core.scheduler.slots) if holder}
        kept = [handle for handle in handles if at[handle.request.id] in slots]
        for handle in handles:
            if handle not in kept:
                handle.cancel()
        layout.is_active = is_active
        _wait(kept, lambda: len(_decode_steps(list(steps), len(slots))) >= args.steps)
        for handle in kept:
            handle.cancel()
        for handle in handles:
            handle.result(PATIENCE_S)
    return _decode_steps(steps, len(slots))[: args.steps]


def _new_tokens(args: argparse.Namespace) -> int:
    """Of a request: more than are measured and than what comes before, so that no request ends by itself."""
    return 2 * int(args.slots + args.steps)


def _submit(model: Model, args: argparse.Namespace, name: str, prompt: list[int]) -> Handle:
    request = Request(name, tuple(prompt), GREEDY, max_tokens=_new_tokens(args), ignore_eos=True)
    return model.engine.submit(request)


def _decode_steps(steps: list[StepStats], busy: int) -> list[float]:
    return [step.step_ms for step in steps if step.decode_tokens == busy and not step.prefill_tokens]


def _wait(handles: list[Handle], condition: Callable[[], bool]) -> None:
    """Looks at what the engine does, from outside."""
    while not condition():
        if any(handle.done for handle in handles):
            raise RuntimeError("requests ended before their slots were seen; give them more --steps")
        time.sleep(0.002)

"""The time to the first token of a long prompt: cold, from RAM, after a restart, in another process."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cellama.bench.harness.engines import random_prompts
from cellama.bench.harness.report import Report

from .engine_process import Asked, EngineProcess

COLD, RAM, RESTART = "cold", "from RAM", "after a restart"
SECOND, UNCACHED = "in a second process", "after a restart, files not in the page cache"
HOPED = {f"{RESTART} over {COLD}": "<= 0.15", f"{RESTART} over {RAM}": "<= 1.5", f"{SECOND} over {COLD}": "<= 0.2"}


def measure(path: Path, args: argparse.Namespace) -> Report:
    """Medians of as many prompts; all processes have one slot, so that what is kept is in RAM or on disk."""
    prompts = random_prompts(args.samples, args.prompt, seed=args.seed)
    found: dict[str, list[Asked]] = {}
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"n_parallel": 1, "ctx_per_slot": args.prompt + 64, "cache_dir": folder}
        with EngineProcess(path, **options) as first, EngineProcess(path, **options) as second:
            found[COLD] = _ask_all(first, prompts)
            found[RAM] = _ask_all(first, prompts)
            first.save_states()
            found[SECOND] = _ask_all(second, prompts)
        with EngineProcess(path, **options) as again:
            found[RESTART] = _ask_all(again, prompts)
        _forget_pages(Path(folder))
        with EngineProcess(path, **options) as again:
            found[UNCACHED] = _ask_all(again, prompts)
    texts_off = [way for way, asked in found.items() if [a.tokens for a in asked] != [a.tokens for a in found[COLD]]]
    if texts_off:
        raise RuntimeError(f"other tokens than cold: {texts_off}")
    times = {way: median(asked.ttft_ms for asked in each) for way, each in found.items()}
    pairs = ((RESTART, COLD), (RESTART, RAM), (SECOND, COLD), (UNCACHED, COLD))
    return Report(
        [_row(way, each) for way, each in found.items()],
        {f"{one} over {other}": times[one] / times[other] for one, other in pairs},
        HOPED,
        [f"First tokens of {args.prompt} random tokens, given to the engine one at a time, after a second's rest."],
    )


def _ask_all(engine: EngineProcess, prompts: Sequence[Sequence[int]]) -> list[Asked]:
    return [engine.ask(prompt) for prompt in prompts]


def _row(way: str, asked: Sequence[Asked]) -> dict[str, Any]:
    times = sorted(each.ttft_ms for each in asked)
    return {
        "first token": way,
        "median ms": median(times),
        "least ms": times[0],
        "most ms": times[-1],
        "cached tokens": min(each.num_cached for each in asked),
        "tier": ", ".join(sorted({each.tier or "none" for each in asked})),
    }


def _forget_pages(folder: Path) -> None:
    """The system has nothing of these files in memory."""
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

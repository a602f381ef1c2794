"""Four-turn chats, more of them than slots: time to the first token with the cache on and off.

The times count from submission. All conversations go on at once, each turn of one after the answer to its last.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import GREEDY, loaded, model_path, percentile, random_prompts, warm_up
from cellama.bench.harness.report import Report
from cellama.engine import Request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--system", type=int, default=256, help="tokens of the system prompt, the same for all")
    parser.add_argument("--message", type=int, default=64, help="tokens of a user's message")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--think", type=float, default=2.0, help="seconds between an answer and the next message")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    off, on = (talk(path, args, cache_prompt=cache) for cache in (False, True))
    rows = [_row("cache off", off), _row("cache on", on)]
    ratios = {name: rows[0][name] / rows[1][name] for name in ("median ms", "p95 ms")}
    return Report(
        rows,
        ratios,
        {"median ms": ">= 3.5", "p95 ms": ">= 2"},
        ["Time to the first token of all turns; the first ones can share the system prompt only."],
    )


def _row(name: str, times: list[float]) -> dict[str, Any]:
    return {"who": name, "median ms": percentile(times, 0.5), "p95 ms": percentile(times, 0.95), "turns": len(times)}


def talk(path: Path, args: argparse.Namespace, *, cache_prompt: bool) -> list[float]:
    """Milliseconds to the first token of every turn."""
    length = args.system + args.turns * (args.message + args.new)
    openings = random_prompts(args.conversations, args.system + args.message, shared=args.system, seed=args.seed)
    messages = random_prompts(args.conversations * args.turns, args.message, seed=args.seed + 1)
    times: list[float] = []
    with loaded(path, n_parallel=args.slots, ctx_per_slot=length + 1, n_batch=512, cache_prompt=cache_prompt) as model:
        warm_up(model)

        def converse(number: int) -> None:
            tokens = openings[number]
            time.sleep(args.think * number / args.conversations)
            for turn in range(args.turns):
                request = Request(f"{number}.{turn}", tuple(tokens), GREEDY, max_tokens=args.new, ignore_eos=True)
                done = model.engine.submit(request).result()
                times.append(done.timings.ttft_ms or 0.0)
                tokens = [*tokens, *done.tokens, *messages[number * args.turns + turn]]
                time.sleep(args.think)

        threads = [threading.Thread(target=converse, args=(number,)) for number in range(args.conversations)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return times

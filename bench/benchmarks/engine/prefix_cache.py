"""Measure the time to first token in four-turn chats with the cache enabled and disabled.

The number of chats exceeds the number of slots. llama-server, which also keeps prompts in RAM, receives the same chats.
Times are measured from submission. All conversations run concurrently, and each turn starts when the previous one has
finished.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cellama.bench.harness.engines import CORES, GREEDY, loaded, model_path, percentile, random_prompts, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import LlamaServer, llama_server
from cellama.engine import Model, Request

OURS, SERVER = "engine", "llama-server"
ON, NO_RAM, OFF = "cache on", "cache on, none in RAM", "cache off"
OPTIONS: dict[str, dict[str, Any]] = {ON: {}, NO_RAM: {"cache_ram_bytes": 0}, OFF: {"cache_prompt": False}}
MEDIAN, P95 = "median ms", "p95 ms"
Ask = Callable[[str, Sequence[int]], tuple[float, Sequence[int]]]  # → milliseconds to the first token, new tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--system", type=int, default=256, help="number of tokens in the shared system prompt")
    parser.add_argument("--message", type=int, default=64, help="number of tokens per user message")
    parser.add_argument("--new", type=int, default=32, help="number of tokens per answer")
    parser.add_argument("--think", type=float, default=2.0, help="seconds between an answer and the next message")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path, size = model_path(args.model), args.system + args.turns * (args.message + args.new) + 1
    times: dict[tuple[str, str], list[float]] = {}
    for cache, options in OPTIONS.items():
        with loaded(path, n_parallel=args.slots, ctx_per_slot=size, n_batch=512, **options) as model:
            warm_up(model)
            times[OURS, cache] = talk(partial(_ask_engine, model, args.new), args)
    with llama_server(path, args.slots, size, CORES) as server:
        if server:
            for cache in (ON, OFF):
                times[SERVER, cache] = talk(partial(_ask_server, server, args.new, cache == ON), args)
    rows = {way: _row(way, found) for way, found in times.items()}
    ratios = _over(rows[OURS, OFF], rows[OURS, ON], "") | _over(
        rows[OURS, NO_RAM], rows[OURS, ON], ", none in RAM over on"
    )
    if (SERVER, ON) in rows:
        ratios |= _over(rows[SERVER, ON], rows[OURS, ON], ", llama-server over ours")
    return Report(
        list(rows.values()),
        ratios,
        dict.fromkeys(ratios, ">= 1.0") | {MEDIAN: ">= 3.5", P95: ">= 2"},
        ["Time to the first token of all turns. First turns can share only the system prompt."],
    )


def _over(row: dict[str, Any], other: dict[str, Any], name: str) -> dict[str, float]:
    return {f"{column}{name}": row[column] / other[column] for column in (MEDIAN, P95)}


def _row(way: tuple[str, str], times: list[float]) -> dict[str, Any]:
    return {"who": ", ".join(way), MEDIAN: percentile(times, 0.5), P95: percentile(times, 0.95), "turns": len(times)}


def _ask_engine(model: Model, num_new: int, name: str, tokens: Sequence[int]) -> tuple[float, Sequence[int]]:
    request = Request(name, tuple(tokens), GREEDY, max_tokens=num_new, ignore_eos=True)
    done = model.engine.submit(request).result()
    return done.timings.ttft_ms or 0.0, done.tokens


def _ask_server(
    server: LlamaServer, num_new: int, cache: bool, _name: str, tokens: Sequence[int]
) -> tuple[float, Sequence[int]]:
    reply = server.complete(tokens, num_new, cache_prompt=cache)
    return reply.ttft_s * 1e3, reply.tokens


def talk(ask: Ask, args: argparse.Namespace) -> list[float]:
    """Return the time to first token of each turn in milliseconds."""
    openings = random_prompts(args.conversations, args.system + args.message, shared=args.system, seed=args.seed)
    messages = random_prompts(args.conversations * args.turns, args.message, seed=args.seed + 1)
    times: list[float] = []

    def converse(number: int) -> None:
        tokens = openings[number]
        time.sleep(args.think * number / args.conversations)
        for turn in range(args.turns):
            ttft_ms, answer = ask(f"{number}.{turn}", tokens)
            times.append(ttft_ms)
            tokens = [*tokens, *answer, *messages[number * args.turns + turn]]
            time.sleep(args.think)

    threads = [threading.Thread(target=converse, args=(number,)) for number in range(args.conversations)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times

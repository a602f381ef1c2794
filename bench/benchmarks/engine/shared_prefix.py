"""Requests that share a long prefix, against llama-server and against the least that has to be computed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import CORES, loaded, model_path, random_prompts, run_all, steps_of, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import LLAMA_SERVER, LlamaServer, program

from .decode import context

_WHY = (
    "What is left after the prefix are suffixes and decoding, which none share: at the rates of llama-batched-bench "
    "on the machine of the kept results (743 prompt tokens/s, 444 decoded tokens/s at 32 slots with short contexts) "
    "these alone take 29.5 s, which is 2.1 times less than llama-server needs. With contexts of 384 to 448 tokens "
    "attention slows both down (650 and 340 tokens/s), so a factor of 2 is out of reach there."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=384, help="tokens")
    parser.add_argument("--shared", type=int, default=320, help="of these")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--slots", type=int, default=32, help="of both sides")
    parser.add_argument("--best-slots", type=int, default=128, help="of the engine's best settings")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path, peer = model_path(args.model), program(LLAMA_SERVER)
    prompts = random_prompts(args.requests, args.prompt, shared=args.shared, seed=args.seed)
    optimum = args.shared + args.requests * (args.prompt - args.shared)
    rows = [_engine_row(path, args, prompts, slots) for slots in (args.slots, args.best_slots)]
    ratios = {"prefill tokens over a trie's optimum": max(row["prefill tokens"] for row in rows) / optimum}
    targets = {"prefill tokens over a trie's optimum": "<= 1.05"}
    if peer:
        size = context(args.slots, args.prompt, args.new)
        options = ("-np", str(args.slots), "-c", str(size), "-t", str(CORES), "-b", "2048", "-ub", "512")
        with LlamaServer.start(peer, path, *options, "-no-kvu") as server:
            server.complete(prompts[0][:16], 4)
            seconds, replies = server.complete_all(prompts, args.new)
        computed = sum(reply.num_computed for reply in replies)
        rows.append({"who": "llama-server", "slots": args.slots, "seconds": seconds, "prefill tokens": computed})
        ratios["llama-server over the engine"] = seconds / rows[0]["seconds"]
        ratios["llama-server over the engine's best"] = seconds / rows[1]["seconds"]
        targets["llama-server over the engine's best"] = ">= 2.0"
    return Report(rows, ratios, targets, [_WHY])


def _engine_row(path: Path, args: argparse.Namespace, prompts: list[list[int]], slots: int) -> dict[str, Any]:
    size = context(slots, args.prompt, args.new)
    with loaded(path, n_parallel=slots, n_ctx=size, kv_layout="partitioned") as model:
        warm_up(model)
        with steps_of(model) as steps:
            seconds, _ = run_all(model, prompts, args.new, priority=9, stream=False)
    computed = sum(step.prefill_tokens for step in steps)
    return {"who": "engine", "slots": slots, "seconds": seconds, "prefill tokens": computed}

"""Requests that share a long prefix, against llama-server and against the least that has to be computed."""

from __future__ import annotations

import argparse
from typing import Any

from .decode import context
from .engines import CORES, loaded, model_path, random_prompts, run_all, steps_of, warm_up
from .peers import LLAMA_SERVER, LlamaServer, program
from .report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=384, help="tokens")
    parser.add_argument("--shared", type=int, default=320, help="of these")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path, peer = model_path(args.model), program(LLAMA_SERVER)
    prompts = random_prompts(args.requests, args.prompt, shared=args.shared, seed=args.seed)
    optimum = args.shared + args.requests * (args.prompt - args.shared)
    size = context(args.slots, args.prompt, args.new)
    with loaded(path, n_parallel=args.slots, n_ctx=size, n_batch=2048, kv_layout="partitioned") as model:
        warm_up(model)
        with steps_of(model) as steps:
            seconds, _ = run_all(model, prompts, args.new, priority=9, stream=False)
        computed = sum(step.prefill_tokens for step in steps)
    rows: list[dict[str, Any]] = [{"who": "engine", "seconds": seconds, "prefill tokens": computed}]
    ratios = {"prefill tokens over a trie's optimum": computed / optimum}
    targets = {"prefill tokens over a trie's optimum": "<= 1.05"}
    if peer:
        options = ("-np", str(args.slots), "-c", str(size), "-t", str(CORES), "-b", "2048", "-ub", "512")
        with LlamaServer.start(peer, path, *options, "-no-kvu") as server:
            server.complete(prompts[0][:16], 4)
            theirs, replies = server.complete_all(prompts, args.new)
        rows.append({"who": "llama-server", "seconds": theirs, "prefill tokens": sum(r.num_computed for r in replies)})
        ratios["llama-server's time over ours"] = theirs / seconds
        targets["llama-server's time over ours"] = ">= 2.0"
    return Report(rows, ratios, targets)

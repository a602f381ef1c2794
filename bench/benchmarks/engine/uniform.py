"""Many requests of one length at once, against llama-server with the same slots and with its defaults."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import CORES, loaded, model_path, random_prompts, run_all, steps_of, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import LLAMA_SERVER, LlamaServer, program

from .decode import context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--slots", type=int, default=32, help="of the comparison with the same settings")
    parser.add_argument("--best-slots", type=int, default=64, help="of the engine's best settings")
    parser.add_argument("--best-ubatch", type=int, default=512, help="of the engine's best settings")
    parser.add_argument(
        "--server-slots", type=int, nargs="*", default=[16, 32, 64], help="its defaults, tried with each"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path, peer = model_path(args.model), program(LLAMA_SERVER)
    prompts = random_prompts(args.requests, args.prompt, seed=args.seed)
    total = args.requests * (args.prompt + args.new)

    def row(name: str, slots: int, seconds: float) -> dict[str, Any]:
        return {"who": name, "slots": slots, "seconds": seconds, "tokens/s": total / seconds}

    rows = [
        row("engine, same settings", args.slots, engine(path, args, prompts, args.slots, 512)),
        row("engine, best settings", args.best_slots, engine(path, args, prompts, args.best_slots, args.best_ubatch)),
    ]
    if not peer:
        return Report(rows)
    same = server(peer, path, args, prompts, args.slots, same=True)
    rows.append(row("llama-server, same settings", args.slots, same))
    defaults = {slots: server(peer, path, args, prompts, slots, same=False) for slots in args.server_slots}
    rows += [row("llama-server, its defaults", slots, seconds) for slots, seconds in defaults.items()]
    ratios = {
        "same settings": same / rows[0]["seconds"],
        "best against best": min(defaults.values()) / rows[1]["seconds"],
    }
    return Report(
        rows,
        ratios,
        {"same settings": ">= 1.0", "best against best": ">= 1.10"},
        ["The server is asked over HTTP by a thread per request in this process, the engine directly."],
    )


def engine(path: Path, args: argparse.Namespace, prompts: list[list[int]], slots: int, n_ubatch: int) -> float:
    """Seconds of the engine."""
    size = context(slots, args.prompt, args.new)
    options = {"n_parallel": slots, "n_ctx": size, "n_batch": 2048, "n_ubatch": n_ubatch, "kv_layout": "partitioned"}
    with loaded(path, **options) as model:
        warm_up(model)
        with steps_of(model):
            return run_all(model, prompts, args.new, priority=9, stream=False)[0]


def server(
    peer: Path, path: Path, args: argparse.Namespace, prompts: list[list[int]], slots: int, *, same: bool
) -> float:
    """Seconds of llama-server; its defaults get the context that the work needs, which they don't know."""
    options = ["-np", str(slots), "-c", str(context(slots, args.prompt, args.new)), "-t", str(CORES)]
    if same:
        options += ["-b", "2048", "-ub", "512", "-no-kvu"]
    with LlamaServer.start(peer, path, *options) as running:
        running.complete(prompts[0][:16], 4)
        return running.complete_all(prompts, args.new)[0]

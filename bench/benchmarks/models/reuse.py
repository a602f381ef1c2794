"""What models of each kind of memory take over: a family of prompts, and a chat whose answers come back changed.

With the cache on and off, in one run: tokens computed, and time. A model that is given is measured beside the shapes.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import GREEDY, cached_model, loaded, random_prompts, run_all, steps_of, warm_up
from cellama.bench.harness.report import Report
from cellama.bench.models.memory_shapes import HybridShape, RecurrentShape, WindowShape
from cellama.bench.models.synthetic import Shape
from cellama.engine import Model, Request
from cellama.engine.text.reply_format import ReplyFormat

MODEL = "three shapes in F32"
WIDE = {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_head_kv": 4, "n_ff": 1536, "n_vocab": 16000, "n_ctx": 8192}
KINDS: dict[str, Shape] = {
    "window": WindowShape(**WIDE, window=256),
    "recurrent": RecurrentShape(**WIDE, d_state=16),
    "hybrid": HybridShape(**WIDE),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--requests", type=int, default=32, help="of the family")
    parser.add_argument("--prompt", type=int, default=384, help="tokens")
    parser.add_argument("--shared", type=int, default=320, help="of these")
    parser.add_argument("--new", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4, help="of the chat")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    rows, ratios = [], {}
    models = {kind: cached_model(f"synthetic-{kind}-f32.gguf", KINDS[kind], "F32") for kind in args.kinds}
    if args.model:
        models[args.model.stem] = args.model
    for kind, path in models.items():
        off, on = (_row(path, args, cache_prompt=cache) for cache in (False, True))
        rows += [{"memory": kind, "cache": "off", **off}, {"memory": kind, "cache": "on", **on}]
        optimum = args.shared + args.requests * (args.prompt - args.shared)
        ratios[f"{kind}: prefill tokens of the family over a trie's optimum"] = on["family tokens"] / optimum
        for part in ("family", "chat"):
            ratios[f"{kind}: time of the {part}, off over on"] = off[f"{part} s"] / on[f"{part} s"]
    targets = {name: "<= 1.05" for name in ratios if "optimum" in name}
    caveats = ["Each turn of the chat repeats all before it, but for the last two tokens of the prompt and the answer."]
    return Report(rows, ratios, targets, caveats)


def _row(path: Path, args: argparse.Namespace, *, cache_prompt: bool) -> dict[str, Any]:
    """Medians of the rounds; each has prompts of its own."""
    rounds = []
    options = {"n_parallel": args.slots, "kv_layout": "partitioned", "cache_prompt": cache_prompt}
    with loaded(path, ctx_per_slot=args.turns * args.prompt + args.new + 1, **options) as model:
        warm_up(model)
        for number in range(args.rounds):
            seed = args.seed + number
            prompts = random_prompts(args.requests, args.prompt, shared=args.shared, seed=seed)
            with steps_of(model) as steps:
                family_s, _ = run_all(model, prompts, args.new, priority=9, stream=False)
            computed = sum(step.prefill_tokens for step in steps)
            with steps_of(model) as steps:
                chat_s = _chat(model, args, seed)
            rounds.append((computed, family_s, sum(step.prefill_tokens for step in steps), chat_s))
    names = ("family tokens", "family s", "chat tokens", "chat s")
    return dict(zip(names, map(statistics.median, zip(*rounds, strict=True)), strict=True))


def _chat(model: Model, args: argparse.Namespace, seed: int) -> float:
    """Seconds of all turns. What becomes of an answer in the next prompt is not what was generated."""
    seconds = 0.0
    tokens: list[int] = []
    for turn, message in enumerate(random_prompts(args.turns, args.prompt - args.new, seed=seed + 1000)):
        tokens = [*tokens[:-2], *message]
        request = Request(str(turn), tuple(tokens), GREEDY, max_tokens=args.new, ignore_eos=True, reply=ReplyFormat())
        seconds += model.engine.submit(request).result().timings.duration_ms / 1e3
    return seconds

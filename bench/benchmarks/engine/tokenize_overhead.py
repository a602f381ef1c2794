"""What tokenizing costs: beside the generation that follows, from text against from tokens, and over threads."""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

from cellama.bench.harness.engines import loaded, model_path, warm_up
from cellama.bench.harness.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=256, help="words")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)


def run(args: argparse.Namespace) -> Report:
    with loaded(model_path(args.model), n_parallel=4, ctx_per_slot=4096) as model:
        warm_up(model)
        text = " ".join(f"word{i} is said" for i in range(args.prompt // 3))
        tokens = model.tokenize(text)
        tokenize_ms = _time(lambda: model.tokenize(text), args.repeats)
        parallel_ms = _in_threads(lambda: model.tokenize(text), args.repeats, args.threads)
        detokenize_ms = _time(lambda: model.detokenize(tokens), args.repeats)
        once = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "cache_prompt": False}
        from_text_ms = _time(lambda: model.engine.generate(text, **once), 3)
        from_tokens_ms = _time(lambda: model.engine.generate(tokens, **once), 3)
    rows: list[dict[str, Any]] = [
        {"what": f"tokenize {len(tokens)} tokens", "ms": tokenize_ms},
        {"what": f"the same in {args.threads} threads, per call", "ms": parallel_ms},
        {"what": "detokenize", "ms": detokenize_ms},
        {"what": "generate 8 tokens from text", "ms": from_text_ms},
        {"what": "generate 8 tokens from tokens", "ms": from_tokens_ms},
    ]
    ratios = {
        "tokenizing over generating": tokenize_ms / from_text_ms,
        "speed-up by threads": tokenize_ms / parallel_ms,
    }
    return Report(rows, ratios)


def _time(call: Any, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats * 1e3


def _in_threads(call: Any, repeats: int, num_threads: int) -> float:
    """Milliseconds per call when several threads call at once."""
    threads = [threading.Thread(target=_time, args=(call, repeats)) for _ in range(num_threads)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - started) / (repeats * num_threads) * 1e3

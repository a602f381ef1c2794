"""1000 short texts in one call against one text per call: at the embedder, and through Celery and a real worker.

One text per call means that the next one is sent when the vector of the last one is there. Jobs of one text are also
queued all at once: the worker takes 16 of them at a time, and they share batches.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import CORES, cached_model
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service
from cellama.bench.models.bert import BertShape
from cellama.engine import EngineOptions, Model, ModelManager

MODEL = "synthetic BERT Q8_0"
CALLERS = 16
PATIENCE_S = 3600
SHAPES = {
    "minilm": BertShape(),  # all-MiniLM-L6: 22M parameters, half of them in layers
    "tiny": BertShape(n_embd=128, n_layer=2, n_head=2, n_head_kv=2, n_ff=512),  # BERT-Tiny: 0.4M in layers
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="minilm", help="of the model, unless --model gives one")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--words", type=int, nargs=2, default=(6, 30), help="least and most words of a text")
    parser.add_argument("--rounds", type=int, default=3, help="of each way at the embedder; the best counts")
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path = encoder_path(args.model, args.shape)
    texts = random_texts(args.texts, *args.words, seed=args.seed)
    times = {**_at_the_embedder(path, texts, args), **_through_the_queue(path, texts, args)}
    rows: list[dict[str, Any]] = [
        {"way": way, "seconds": seconds, "texts/s": len(texts) / seconds} for way, seconds in times.items()
    ]
    one, callers, all_, jobs_in_turn, jobs, job = times.values()
    ratios = {
        "one call over one text per call, embedder": one / all_,
        f"{CALLERS} callers over one": one / callers,
        "one job over one text per job, queue": jobs_in_turn / job,
        "one job over jobs of one text, all queued at once": jobs / job,
    }
    targets = dict.fromkeys(list(ratios)[::2], ">= 3")
    return Report(rows, ratios, targets)


def encoder_path(given: Path | None, shape: str) -> Path:
    """The given file, else one of a shape with random weights, written once."""
    return given or cached_model(f"synthetic-bert-{shape}-q8_0.gguf", SHAPES[shape], "Q8_0")


def random_texts(count: int, least: int, most: int, *, seed: int) -> list[str]:
    """Texts of words that are one token each."""
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randrange(10_000)}" for _ in range(rng.randint(least, most))) for _ in range(count)]


def _at_the_embedder(path: Path, texts: list[str], args: argparse.Namespace) -> dict[str, float]:
    manager = ModelManager()
    try:
        options = EngineOptions(threads=args.threads)
        model = manager.load("bench", str(path), options=options, capabilities=["embed"])
        tokens = [model.tokenize(text) for text in texts]
        model.embedder.submit(tokens[:100]).result()
        ways: dict[str, Callable[[], Any]] = {
            "embedder, one text per call": lambda: [model.embedder.submit([text]).result() for text in tokens],
            f"embedder, {CALLERS} callers with one text per call": lambda: _in_threads(model, tokens),
            "embedder, one call": lambda: model.embedder.submit(tokens).result(),
        }
        # Round by round, so that whatever else the machine does meets all ways alike.
        rounds = [{name: _seconds(way) for name, way in ways.items()} for _ in range(args.rounds)]
        return {name: min(times[name] for times in rounds) for name in ways}
    finally:
        manager.close()


def _in_threads(model: Model, tokens: list[list[int]]) -> None:
    with ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(lambda text: model.embedder.submit([text]).result(), tokens))


def _through_the_queue(path: Path, texts: list[str], args: argparse.Namespace) -> dict[str, float]:
    model = {"id": "bench", "source": str(path), "threads": args.threads, "capabilities": ["embed"], "default": True}
    model["batch_strategy"] = "adaptive"
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [model]) as service:
        service.start_worker()
        service.wait_ready()
        from cellama.tasks import embed

        def at_once() -> None:
            for job in [embed.delay("bench", text) for text in texts]:
                job.get(timeout=PATIENCE_S)

        embed.delay("bench", texts[:100]).get(timeout=PATIENCE_S)
        times = {
            "queue, one text per job": _seconds(
                lambda: [embed.delay("bench", text).get(timeout=PATIENCE_S) for text in texts]
            ),
            "queue, jobs of one text at once": _seconds(at_once),
            "queue, one job": _seconds(lambda: embed.delay("bench", texts).get(timeout=PATIENCE_S)),
        }
    os.environ.pop("CELLAMA_MODELS", None)
    return times


def _seconds(way: Callable[[], Any]) -> float:
    started = time.monotonic()
    way()
    return time.monotonic() - started

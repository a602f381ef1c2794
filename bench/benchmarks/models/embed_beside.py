"""A stream on one model while another model of the same process embeds: the gaps between its tokens."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from cellama.bench.harness.engines import CORES, FIRST_WORD, GREEDY, model_path, percentile
from cellama.bench.harness.report import Report
from cellama.engine import EngineOptions, Model, ModelManager, Request, Text

from .embeddings import encoder_path, random_texts

MODEL = "synthetic 174M Q8_0 generates, synthetic BERT 22M Q8_0 embeds"
MAX_TOKENS = 100_000  # the stream goes on until it is cancelled
NUM_ALONE = 100  # gaps before the embedding begins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--words", type=int, nargs=2, default=(6, 30), help="least and most words of a text")
    parser.add_argument("--context", type=int, default=4096, help="of the stream")
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    manager = ModelManager()
    try:
        options = EngineOptions(n_parallel=1, ctx_per_slot=args.context, threads=args.threads)
        writer = manager.load("writer", str(model_path(args.model)), options=options, capabilities=["generate"])
        reader = manager.load(
            "reader",
            str(encoder_path(args.model, "minilm")),
            options=EngineOptions(threads=args.threads),
            capabilities=["embed"],
        )
        texts = [reader.tokenize(text) for text in random_texts(args.texts, *args.words, seed=args.seed)]
        reader.embedder.submit(texts[: len(texts) // 10]).result()
        idle_s = _embed_s(reader, texts)
        alone, beside, busy_s = _stream(writer, reader, texts, min(NUM_ALONE, args.context // 4))
    finally:
        manager.close()
    rows = [_row("alone", alone), _row("beside the embedder", beside)]
    ratios = {
        "longest gap over the median alone": rows[1]["longest ms"] / rows[0]["median ms"],
        "time to embed, beside the stream over alone": busy_s / idle_s,
    }
    return Report(rows, ratios)


def _embed_s(reader: Model, texts: Sequence[Sequence[int]]) -> float:
    started = time.monotonic()
    reader.embedder.submit(texts).result()
    return time.monotonic() - started


def _stream(
    writer: Model, reader: Model, texts: Sequence[Sequence[int]], num_alone: int
) -> tuple[list[float], list[float], float]:
    """Gaps in seconds alone and beside the embedder, and the seconds that it took."""
    times: list[float] = []
    writer.engine.add_listener(
        lambda events: times.extend(time.monotonic() for event in events if isinstance(event, Text))
    )
    request = Request("stream", (FIRST_WORD,) * 8, GREEDY, max_tokens=MAX_TOKENS, ignore_eos=True)
    handle = writer.engine.submit(request)
    while len(times) <= num_alone and not handle.future.done():
        time.sleep(0.005)
    began = len(times)
    seconds = _embed_s(reader, texts)
    ended = len(times)
    handle.cancel()
    handle.result()
    return _gaps(times[:began]), _gaps(times[began - 1 : ended]), seconds


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def _row(name: str, gaps: Sequence[float]) -> dict[str, Any]:
    ms = [gap * 1e3 for gap in gaps] or [0.0]
    found = {"stream": name, "gaps": len(gaps), "median ms": median(ms), "p95 ms": percentile(ms, 0.95)}
    return {**found, "longest ms": max(ms)}

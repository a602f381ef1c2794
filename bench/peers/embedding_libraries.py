"""Embed texts with fastembed or sentence-transformers. This program runs in the library's own environment.

The program receives one JSON object per line: `{"texts": FILE, "vectors": FILE}`. It embeds the JSON list of texts,
writes the vectors as a NumPy file, and answers `{"seconds": …}`. With `"choose": true`, it first measures several batch
sizes and keeps the fastest one. Only the standard library, numpy and the library may be imported here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

BATCH_SIZES = (4, 8, 16, 32, 128)
Embed = Callable[[Sequence[str], int], Any]  # texts, batch size


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    kind, directory, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if kind == "export":
        export(directory, sys.argv[4])
        return
    embed = {"fastembed": fastembed, "torch": torch, "onnx": onnx}[kind](directory, threads)

    import numpy

    batch_size = 32
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        with open(asked["texts"], encoding="utf-8") as file:
            texts = json.load(file)
        if asked.get("choose"):
            batch_size = min(BATCH_SIZES, key=lambda size: seconds(embed, texts, size))
        started = time.perf_counter()
        vectors = embed(texts, batch_size)
        passed = time.perf_counter() - started
        numpy.save(asked["vectors"], numpy.asarray(vectors, dtype=numpy.float32))
        print(json.dumps({"seconds": passed, "batch_size": batch_size}), flush=True)


def seconds(embed: Embed, texts: Sequence[str], size: int) -> float:
    started = time.perf_counter()
    embed(texts, size)
    return time.perf_counter() - started


def fastembed(directory: str, threads: int) -> Embed:
    """Return a function that embeds texts with fastembed (ONNX Runtime)."""
    from fastembed import TextEmbedding

    model = TextEmbedding(
        "sentence-transformers/all-MiniLM-L6-v2", specific_model_path=directory, threads=threads, local_files_only=True
    )
    return lambda texts, size: list(model.embed(texts, batch_size=size))


def torch(directory: str, threads: int) -> Embed:
    """Return a function that embeds texts with sentence-transformers and PyTorch."""
    import torch as library
    from sentence_transformers import SentenceTransformer

    library.set_num_threads(threads)
    model = SentenceTransformer(directory, device="cpu")
    return lambda texts, size: model.encode(texts, batch_size=size)


def onnx(directory: str, threads: int) -> Embed:
    """Return a function that embeds texts with sentence-transformers and ONNX Runtime."""
    import onnxruntime
    from sentence_transformers import SentenceTransformer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    kwargs = {"file_name": "model.onnx", "provider": "CPUExecutionProvider", "session_options": options}
    model = SentenceTransformer(directory, backend="onnx", device="cpu", model_kwargs=kwargs)
    return lambda texts, size: model.encode(texts, batch_size=size)


def export(directory: str, target: str) -> None:
    """Convert the published model to ONNX, without the tokenizer's limit of 128 tokens."""
    import shutil

    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(directory, backend="onnx", device="cpu", model_kwargs={"export": True})
    model.save_pretrained(target)
    shutil.move(os.path.join(target, "onnx", "model.onnx"), os.path.join(target, "model.onnx"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = os.path.join(target, name)
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        for key in ("truncation", "padding", "max_length"):
            content.pop(key, None)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file)


if __name__ == "__main__":
    main()

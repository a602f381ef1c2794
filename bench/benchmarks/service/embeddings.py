"""Compare the rate of embeddings with fastembed, sentence-transformers and llama-server on the same machine.

The model is all-MiniLM-L6-v2 with its published weights (bench/models/minilm.py). cellama is measured without a queue,
through the queue, and from file to file. The libraries are installed into separate environments, and use the batch size
that was fastest for each text length. All variants stay loaded, and rounds alternate between the variants.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cellama.api import Client
from cellama.bench.harness.engines import CORES
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import serving
from cellama.bench.models.minilm import minilm_directory, minilm_model
from cellama.bench.models.synthetic import FILE_TYPES
from cellama.bench.peers.embedding_peers import (
    LIBRARIES,
    Library,
    Vectors,
    embed_with_server,
    export_onnx,
    python_of,
)
from cellama.bench.peers.programs import LLAMA_SERVER, LlamaServer, program
from cellama.engine import EngineOptions, Model, ModelManager

MODEL = "all-MiniLM-L6-v2"
ENGINE, JOBS, SERVER = "engine", "jobs", "llama-server"
WORDS = (
    "river stone light house garden winter summer paper music letter bridge window market station school doctor engine "
    "forest island mountain silver golden quiet early simple common modern famous written opened carried followed"
).split()  # MiniLM has a token for each of these words
NUM_SPECIAL = 2  # tokens that BERT adds to each text
PER_JOB = 64  # texts per job
PATIENCE_S = 600.0
WARM_UP_TOKENS = 4096  # enough to choose a library's batch size and to compare vectors
TARGETS = {"cosine": ">= 0.9999", "jobs over": ">= 0.95", f"over {SERVER}": ">= 2", "over the fastest": ">= 1"}
_BATCH = [sys.executable, "-c", "from cellama.api.cli import main; main()", "batch", "run"]

Embed = Callable[[Sequence[str]], tuple[float, Vectors]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 32, 64, 128, 256], help="tokens per text")
    parser.add_argument("--tokens", type=int, default=16384, help="number of tokens in all texts of a length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--file-type", choices=sorted(FILE_TYPES), default="F32", help="type of cellama's matrices")
    parser.add_argument("--threads", type=int, default=CORES, help="number of threads per program")
    parser.add_argument("--server-slots", type=int, default=8, help="number of llama-server slots")
    parser.add_argument(
        "--libraries", nargs="*", choices=list(LIBRARIES), default=list(LIBRARIES), help="libraries to compare with"
    )
    parser.add_argument(
        "--environments", help="directory for the libraries' environments (default: a temporary directory)"
    )


def run(args: argparse.Namespace) -> Report:
    model = args.model or minilm_model(args.file_type)
    libraries = [] if args.model else args.libraries
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways = _ours(model, args.threads, scratch, stack)
        if server := program(LLAMA_SERVER):
            options = ["-t", str(args.threads), "-np", str(args.server_slots), "-b", "2048", "-ub", "2048"]
            running = stack.enter_context(LlamaServer.start(server, model, "--embeddings", *options))
            ways[SERVER] = partial(embed_with_server, running)
        environments = Path(args.environments or scratch / "environments").absolute()
        peers = _libraries(libraries, environments, args.threads, scratch, stack)
        for length in args.lengths:
            texts = _texts(max(1, args.tokens // length), length)
            every = {**ways, **{name: peer.embed for name, peer in peers.items()}}
            found = _measure(every, peers, texts, length, args.rounds)
            rows += [{"tokens": length, "texts": len(texts), "who": name, **row} for name, row in found.items()]
            ratios |= _ratios(length, found)
    targets = {key: next(target for part, target in TARGETS.items() if part in key) for key in ratios}
    caveats = [
        "The rate is the median of the rounds, in texts per second. Clients, servers and workers share the cores.",
        "File-to-file times include the start of the command, which takes about a second.",
    ]
    return Report(rows, ratios, targets, caveats)


def _texts(count: int, length: int) -> list[str]:
    rng = random.Random(length)
    return [" ".join(rng.choices(WORDS, k=max(1, length - NUM_SPECIAL))) for _ in range(count)]


def _libraries(
    names: Sequence[str], environments: Path, threads: int, scratch: Path, stack: contextlib.ExitStack
) -> dict[str, Library]:
    if not names:
        return {}
    published = minilm_directory()
    exported = export_onnx(environments, published)
    found = {}
    for name in names:
        environment, kind = LIBRARIES[name]
        directory = published if kind == "torch" else exported
        python = python_of(environments, environment)
        found[name] = stack.enter_context(Library.start(python, kind, directory, threads, scratch))
    return found


def _ours(path: Path, threads: int, scratch: Path, stack: contextlib.ExitStack) -> dict[str, Embed]:
    """Start the engine and a worker, and return cellama's variants."""
    manager = ModelManager()
    stack.callback(manager.close)
    model = manager.load(ENGINE, str(path), options=EngineOptions(threads=threads), capabilities=["embed"])
    stack.enter_context(serving({"source": str(path), "threads": threads, "capabilities": ["embed"]}))
    client = stack.enter_context(Client())
    return {
        ENGINE: partial(_engine, model),
        JOBS: partial(_jobs, client),
        "file to file, JSONL": partial(_jsonl, scratch),
        "file to file, Parquet": partial(_parquet, scratch),
    }


def _engine(model: Model, texts: Sequence[str]) -> tuple[float, Vectors]:
    started = time.perf_counter()
    vectors = model.embedder.submit(model.tokens_of(texts)).result()
    return time.perf_counter() - started, np.array(vectors)


def _jobs(client: Client, texts: Sequence[str]) -> tuple[float, Vectors]:
    """Embed texts with jobs of PER_JOB texts."""
    pages = [list(texts[start : start + PER_JOB]) for start in range(0, len(texts), PER_JOB)]
    started = time.perf_counter()
    jobs = client.embed_many("bench", pages, encoding="base64")
    coded = [text for job in jobs for text in job.result(PATIENCE_S)["embeddings"]]
    vectors = np.array([np.frombuffer(base64.b64decode(str(text)), dtype="<f4") for text in coded])
    return time.perf_counter() - started, vectors


def _jsonl(scratch: Path, texts: Sequence[str]) -> tuple[float, Vectors]:
    source, target = scratch / "texts.jsonl", scratch / "vectors.jsonl"
    lines = (json.dumps({"custom_id": str(number), "text": text}) for number, text in enumerate(texts))
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    seconds = _batch(source, target)
    found = {line["id"]: line for line in map(json.loads, target.read_text(encoding="utf-8").splitlines())}
    return seconds, np.array([found[str(number)]["embeddings"][0] for number in range(len(texts))], dtype=np.float32)


def _parquet(scratch: Path, texts: Sequence[str]) -> tuple[float, Vectors]:
    source, target = scratch / "texts.parquet", scratch / "vectors.parquet"
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": list(texts)}), source)
    seconds = _batch(source, target, "--as", "embed", "--column", "text")
    table = pq.read_table(target).sort_by("id")
    return seconds, np.array(table.column("embedding").to_pylist(), dtype=np.float32)


def _batch(source: Path, target: Path, *options: str) -> float:
    """Run `cellama batch run`, and return its seconds."""
    for old in target.parent.glob(f"{target.name}*"):  # the output of an earlier round would be continued
        old.unlink()
    started = time.perf_counter()
    argv = [*_BATCH, str(source), "-o", str(target), "--model", "bench", *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`cellama batch run` exited with code {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - started


def _measure(
    ways: dict[str, Embed], peers: dict[str, Library], texts: Sequence[str], length: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Return each variant's rate, and the least cosine similarity of its vectors to the reference.

    The last library's vectors are the reference, or the engine's vectors if there is no library.
    """
    vectors: dict[str, Vectors] = {}
    some = texts[: max(1, WARM_UP_TOKENS // length)]
    for name, embed in ways.items():
        _, vectors[name] = peers[name].embed(some, choose=True) if name in peers else embed(some)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, embed in ways.items():
            seconds[name].append(embed(texts)[0])
    reference = _unit(vectors[[ENGINE, *peers][-1]])
    return {
        name: {
            "texts/s": len(texts) / median(seconds[name]),
            "most": len(texts) / min(seconds[name]),
            "cosine": float((_unit(vectors[name]) * reference).sum(axis=1).min()),
        }
        for name in ways
    }


def _unit(vectors: Vectors) -> Vectors:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _ratios(length: int, found: dict[str, dict[str, float]]) -> dict[str, float]:
    rate = {name: row["texts/s"] for name, row in found.items()}
    ratios = {f"{length}: jobs over engine": rate[JOBS] / rate[ENGINE]}
    if peers := [rate[name] for name in LIBRARIES if name in rate]:
        ratios[f"{length}: engine over the fastest library"] = rate[ENGINE] / max(peers)
    if SERVER in rate:
        ratios[f"{length}: engine over {SERVER}"] = rate[ENGINE] / rate[SERVER]
    return {**ratios, f"{length}: least cosine of the engine": found[ENGINE]["cosine"]}

"""Compare a model's planned memory with the memory that llama.cpp logs and with the process's resident memory."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from cellama.bench.harness.engines import model_path
from cellama.bench.harness.report import Report
from cellama.bench.models.memory_shapes import HybridShape, RecurrentShape, WindowShape
from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import EngineOptions, ModelManager, Request, SamplingParams
from cellama.engine.llama import plan_load
from cellama.engine.memory.budget import AvailableMemory, Footprint

MODEL = "synthetic 174M Q8_0, and three shapes in F32"
MIB = 1 << 20
WIDE = {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_head_kv": 4, "n_ff": 1536, "n_vocab": 16000, "n_ctx": 8192}
SHAPES: dict[str, Shape] = {
    "gemma2": WindowShape(**WIDE, window=1024),
    "mamba": RecurrentShape(**WIDE, d_state=16),
    "lfm2": HybridShape(**WIDE),
}
Q8 = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("16 x 1024", "generate", {"n_parallel": 16, "ctx_per_slot": 1024}),
    ("16 x 1024 q8_0", "generate", {"n_parallel": 16, "ctx_per_slot": 1024, **Q8}),
    ("64 x 512", "generate", {"n_parallel": 64, "ctx_per_slot": 512}),
    ("1 x 8192 no flash", "generate", {"n_parallel": 1, "ctx_per_slot": 8192, "flash_attention": "off"}),
    ("", "embed", {}),
    ("16 x 1024", "generate, embed", {"n_parallel": 16, "ctx_per_slot": 1024}),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=len(CASES), help="number of option sets per model (default: all)")
    parser.add_argument(
        "--shapes", type=int, default=len(SHAPES), help="number of additional model shapes to measure (default: all)"
    )


def run(args: argparse.Namespace) -> Report:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = {"llama": model_path(args.model)}
        for name, shape in list(SHAPES.items())[: args.shapes]:
            models[name] = Path(folder) / f"{len(models)}.gguf"
            write_model(models[name], shape, file_type="F32")
        for name, path in models.items():
            for label, capability, options in CASES[: args.cases]:
                row = {"model": name, "slots": label, "for": capability}
                rows.append(row | in_own_process(path, options, capability))
    ratios = {
        f"planned over {other}, {which.__name__}": which(row["planned"] / row[other] for row in rows)
        for other in ("logged", "resident")
        for which in (min, max)
    }
    ratios["median plan, ms"] = statistics.median(row["plan ms"] for row in rows)
    targets = {name: "0.9 to 1.1" for name in ratios if "logged" in name}
    caveats = (
        "Sizes are in MiB.",
        "resident: growth of the process's RSS, including mapped weights, after all slots and a full batch were used.",
        "logged: buffers that llama.cpp logs after the load. The output buffer has the size for the longest text.",
    )
    return Report(rows, ratios, targets, caveats)


def in_own_process(path: Path, options: dict[str, Any], capability: str) -> dict[str, Any]:
    """Measure the memory in a new process, so that earlier allocations don't affect the result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result: dict[str, Any] = pool.apply(_measure, (path, options, capability))
    return result


def _measure(path: Path, given: dict[str, Any], capability: str) -> dict[str, Any]:
    options = EngineOptions(**given, threads=1, cache_ram_bytes=0)
    capabilities: frozenset[Any] = frozenset(capability.split(", "))
    room = AvailableMemory({})
    plan_load("m", path, options, capabilities, room)  # memory that the libraries allocate only once
    started = time.perf_counter()
    planned = plan_load("m", path, options, capabilities, room).footprint
    plan_ms = (time.perf_counter() - started) * 1e3
    before = psutil.Process().memory_info().rss
    manager = ModelManager("unlimited")
    model = manager.load("m", str(path), options=options, capabilities=capabilities)
    logged = model.memory
    _use(model, options, capabilities)
    resident = psutil.Process().memory_info().rss - before
    manager.close()
    return {
        "weights": _mib(planned, "weights_bytes"),
        "KV": _mib(planned, "kv_bytes"),
        "compute": _mib(planned, "compute_bytes"),
        "planned": round(planned.total_bytes / MIB, 1),
        "logged": round(logged.total_bytes / MIB, 1),
        "resident": round(resident / MIB, 1),
        "plan ms": round(plan_ms, 1),
    }


def _mib(footprint: Footprint, part: str) -> float:
    num_bytes: int = sum(getattr(usage, part) for usage in footprint.devices.values())
    return round(num_bytes / MIB, 1)


def _use(model: Any, options: EngineOptions, capabilities: frozenset[str]) -> None:
    """Compute a full batch in all slots or embed the longest text, or both, depending on the model's capabilities."""
    if "generate" in capabilities:
        length = max(16, -(-options.n_batch // options.num_slots))
        prompts = [tuple(range(300 + slot, 300 + slot + length)) for slot in range(options.num_slots)]
        greedy = SamplingParams(temperature=0)
        requests = [Request(str(i), prompt, greedy, max_tokens=2, ignore_eos=True) for i, prompt in enumerate(prompts)]
        for handle in [model.engine.submit(request) for request in requests]:
            handle.result(600)
    if "embed" in capabilities:
        longest = list(range(300, 300 + model.embedder.max_tokens))
        model.embedder.submit([longest]).result(600)

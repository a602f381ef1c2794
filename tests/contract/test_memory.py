"""Tests of the memory of models: planned before the load, limited by the budget, and rejected before any allocation."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cellama.bench.benchmarks.engine import footprint
from cellama.bench.models.memory_shapes import HybridShape, RecurrentShape, WindowShape
from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import (
    EngineOptions,
    InsufficientMemory,
    InvalidRequest,
    Model,
    ModelManager,
    Request,
    devices,
    vram_info,
)
from cellama.engine.llama import LlamaModel, buffers, gguf_files, plan_load
from cellama.engine.memory.budget import AvailableMemory, Footprint, MemoryUse
from cellama.engine.models.sources import resolve

from .holding import Hold

MIB = 1 << 20
TINY = "bundled://tiny"
OPTIONS = EngineOptions(n_parallel=4, ctx_per_slot=512, threads=1, cache_ram_bytes=0)
SIZES: dict[str, Any] = {"n_embd": 128, "n_layer": 4, "n_head": 2, "n_head_kv": 2, "n_ff": 256, "n_vocab": 2000}
SHAPES = {
    "llama": Shape(**SIZES),
    "window": WindowShape(**SIZES, window=256),
    "recurrent": RecurrentShape(**SIZES),
    "hybrid": HybridShape(**SIZES),
}


MakeManager = Callable[..., ModelManager]


@pytest.fixture
def make_manager() -> Iterator[MakeManager]:
    """Return a function that creates a manager. Its budget is a multiple of the bundled model's memory."""
    made: list[ModelManager] = []

    def make(budget: Any = "auto", on_full: Any = "refuse", *, models: float | None = None) -> ModelManager:
        made.append(ModelManager(int(models * footprint_of().total_bytes) if models else budget, on_full))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


@pytest.fixture
def manager(make_manager: MakeManager) -> ModelManager:
    return make_manager()


@pytest.fixture(scope="session")
def shape_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape") / f"{request.param}.gguf"
    write_model(path, SHAPES[request.param], file_type="F32")
    return path


def footprint_of() -> Footprint:
    """Return the planned memory of the bundled model with OPTIONS for generation."""
    return plan_load("m", resolve(TINY), OPTIONS, frozenset({"generate"}), AvailableMemory({})).footprint


def load(manager: ModelManager, model_id: str) -> Model:
    return manager.load(model_id, TINY, options=OPTIONS, capabilities=["generate"])


@pytest.mark.parametrize("shape_path", SHAPES, indirect=True)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize("capabilities", [("generate",), ("embed",)], ids=["generate", "embed only"])
def test_planned_memory_differs_from_the_memory_used_by_at_most_a_tenth(
    manager: ModelManager, shape_path: Path, cache_type: str, capabilities: tuple[Any, ...]
) -> None:
    options = EngineOptions(
        n_parallel=8, ctx_per_slot=1024, threads=1, cache_type_k=cache_type, cache_type_v=cache_type
    )
    planned = plan_load("m", shape_path, options, frozenset(capabilities), AvailableMemory({})).footprint
    model = manager.load("m", str(shape_path), options=options, capabilities=capabilities)
    assert set(planned.devices) == set(model.memory.devices) == {"CPU"}
    for part in ("weights_bytes", "kv_bytes", "compute_bytes"):
        real = getattr(model.memory.on("CPU"), part)
        assert real > 0, part
        assert getattr(planned.on("CPU"), part) == pytest.approx(real, rel=0.1), part
    # Independent of llama.cpp's log: the size of the file, and the cells of a model without a window or a state.
    assert model.memory.on("CPU").weights_bytes == pytest.approx(shape_path.stat().st_size, rel=0.1)
    if shape_path.stem == "llama" and "generate" in capabilities:
        per_value = {"f16": 2, "q8_0": 34 / 32}[cache_type]
        assert model.memory.on("CPU").kv_bytes == 8 * 1024 * 2 * SIZES["n_layer"] * SIZES["n_embd"] * per_value


def test_embedding_the_longest_text_uses_the_planned_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, Shape(**{**SIZES, "n_vocab": 20_000}))
    measured = footprint.in_own_process(path, {}, "embed")  # in MiB
    assert measured["planned"] > 150
    # The memory of the rest of the process also varies.
    assert measured["planned"] == pytest.approx(measured["resident"], rel=0.2)


def test_model_that_does_not_fit_is_rejected_and_leaves_nothing_behind(make_manager: MakeManager) -> None:
    manager = make_manager(models=1.5)
    load(manager, "a")
    threads = set(threading.enumerate())
    with pytest.raises(InsufficientMemory) as refused:
        load(manager, "b")
    error, needed = refused.value, footprint_of().total_bytes
    assert (error.device, error.code) == ("all devices", "insufficient_memory")
    assert (error.required_bytes, error.available_bytes) == (needed, pytest.approx(needed // 2, rel=0.05))
    for part in ("model 'b' does not fit: it needs", "MiB on all devices", "are available", "lower n_parallel"):
        assert part in str(error)
    assert "or unload 'a'" in str(error)
    assert ([entry.id for entry in manager.entries()], set(threading.enumerate()) - threads) == (["a"], set())
    assert manager.get("a").engine.generate("Once upon a time", max_tokens=4, temperature=0) == ", there was a"
    manager.unload("a")
    assert load(manager, "b").id == "b"


def test_saved_states_count_toward_the_budget(make_manager: MakeManager, tmp_path: Path) -> None:
    needed = footprint_of().total_bytes
    manager, shape = make_manager(needed + 20 * MIB), {"n_parallel": 4, "ctx_per_slot": 512, "threads": 1}
    with pytest.raises(InsufficientMemory, match=r"saved states 30\.0 MiB.*lower n_parallel, ctx_per_slot or cache"):
        manager.load("m", TINY, options=EngineOptions(**shape, cache_ram_bytes=30 * MIB), capabilities=["generate"])
    for wanted, given in ((10 * MIB, 10 * MIB), (None, 5 * MIB)):
        options = EngineOptions(**shape, cache_ram_bytes=wanted)
        model = manager.load("m", TINY, options=options, capabilities=["generate"])
        assert model.options.cache_ram_bytes == model.memory.on("CPU").saved_bytes == pytest.approx(given, rel=0.01)
        assert model.memory.total_bytes == pytest.approx(needed + given, rel=0.05)
        manager.unload("m")
    # Includes states that wait to be written.
    kept = EngineOptions(**shape, cache_ram_bytes=8 * MIB, cache_dir=str(tmp_path))
    assert manager.load("m", TINY, options=kept, capabilities=["generate"]).memory.on("CPU").saved_bytes == 11 * MIB
    manager.unload("m")
    no_use = manager.load("m", TINY, options=EngineOptions(**shape, cache_prompt=False), capabilities=["generate"])
    assert no_use.memory.on("CPU").saved_bytes == 0


def test_huge_context_is_rejected_quickly_when_the_budget_is_auto(manager: ModelManager) -> None:
    before = psutil.Process().memory_info().rss
    options = EngineOptions(n_parallel=64, ctx_per_slot=1_000_000_000 // 64, threads=1)
    with pytest.raises(InsufficientMemory, match=r"on CPU .*\(memory_budget is auto\)"):
        manager.load("m", TINY, options=options, capabilities=["generate"])
    assert psutil.Process().memory_info().rss - before < 500 * MIB
    assert manager.entries() == []


def test_one_of_two_concurrent_loads_is_rejected_when_only_one_fits(make_manager: MakeManager) -> None:
    manager = make_manager(models=1.5)
    for _ in range(3):
        loads = [manager.load_in_background(None, TINY, options=OPTIONS, capabilities=["generate"]) for _ in range(2)]
        outcomes = [load.exception(60) for load in loads]
        assert sorted(type(outcome) for outcome in outcomes if outcome) == [InsufficientMemory]
        assert len(manager.entries()) == 1
        manager.unload(manager.entries()[0].id)


def test_automatic_context_size_fits_into_the_budget(make_manager: MakeManager) -> None:
    manager = make_manager(models=2)
    options = EngineOptions(n_parallel=16, threads=1)
    model = manager.load("m", TINY, options=options, capabilities=["generate"])
    assert model.ctx_per_slot is not None
    assert 512 <= model.ctx_per_slot < model.info.n_ctx_train
    assert model.memory.total_bytes <= manager.memory()["budget"]
    manager.close()
    model = make_manager("unlimited").load("m", TINY, options=options, capabilities=["generate"])
    assert model.ctx_per_slot == model.info.n_ctx_train


@pytest.mark.parametrize("budget", [0, -1, "much", 1.5])
def test_invalid_memory_budget_is_rejected(budget: Any) -> None:
    with pytest.raises(InvalidRequest, match="memory_budget: "):
        ModelManager(budget)
    with pytest.raises(InvalidRequest, match="on_full: 'ignore' is invalid"):
        ModelManager("auto", "ignore")  # type: ignore[arg-type]


def test_least_recently_used_idle_model_is_evicted(make_manager: MakeManager) -> None:
    manager = make_manager(on_full="evict", models=3.5)
    for model_id in ("default", "a", "b"):
        load(manager, model_id)
    manager.get("a").engine.generate("Once", max_tokens=1)
    load(manager, "c")
    assert sorted(manager.models()) == ["a", "c", "default"]
    load(manager, "d")
    assert sorted(manager.models()) == ["c", "d", "default"]


def test_no_model_is_evicted_when_evicting_all_idle_models_is_not_enough(make_manager: MakeManager) -> None:
    manager = make_manager(on_full="evict", models=3.5)
    for model_id in ("default", "a", "b"):
        load(manager, model_id)
    large = EngineOptions(n_parallel=64, ctx_per_slot=2048, threads=1)
    with pytest.raises(InsufficientMemory) as refused:
        manager.load("large", TINY, options=large, capabilities=["generate"])
    assert "unload" not in str(refused.value)
    assert sorted(manager.models()) == ["a", "b", "default"]


def test_busy_model_is_not_evicted(make_manager: MakeManager) -> None:
    manager = make_manager(on_full="evict", models=2.5)
    load(manager, "default")
    model, hold = load(manager, "busy"), Hold()
    handle = model.engine.submit(Request("r", tuple(model.tokenize("Once upon a time")), max_tokens=2), hold)
    assert hold.reached.wait(60)
    try:
        with pytest.raises(InsufficientMemory):
            load(manager, "c")
    finally:
        hold.opened.set()
    handle.result(60)
    assert sorted(manager.models()) == ["busy", "default"]


def test_planning_leaves_nothing_behind_and_does_not_disturb_a_running_model(manager: ModelManager) -> None:
    engine = manager.load("m", TINY, options=OPTIONS, capabilities=["generate"]).engine
    expected = engine.generate("Once upon a time", max_tokens=200, temperature=0)
    footprint_of()
    manager.cores.close()  # because its thread also opens files
    before, files = psutil.Process().memory_info().rss, len(os.listdir("/proc/self/fd"))
    running = threading.Thread(target=lambda: [footprint_of() for _ in range(30)])
    running.start()
    assert engine.generate("Once upon a time", max_tokens=200, temperature=0) == expected
    running.join()
    assert psutil.Process().memory_info().rss - before < 20 * MIB
    assert len(os.listdir("/proc/self/fd")) == files


def test_devices_report_the_memory_of_this_machine() -> None:
    cpu = devices()[0]
    assert (cpu.name, cpu.kind) == ("CPU", "cpu")
    assert 0 < cpu.free_bytes < cpu.total_bytes <= psutil.virtual_memory().total
    found = vram_info()
    assert (found is None) == (len(devices()) == 1)  # None for a build without GPU support


def test_gpu_layers_count_toward_gpu_memory() -> None:
    load = [f"load_tensors: layer {i:3} assigned to device {'CPU' if i < 2 else 'CUDA0'}, is_swa = 0" for i in range(5)]
    sizes = {"token_embd.weight": 100, "output_norm.weight": 1} | {f"blk.{i}.ffn_up.weight": 10 for i in range(4)}
    assert buffers.planned_weights(load, sizes) == {
        "CPU": MemoryUse(120, mapped_bytes=120),
        "CUDA0": MemoryUse(121),
    }
    contexts = [
        "llama_context:  CUDA_Host  output buffer size =     1.00 MiB",
        *(f"llama_kv_cache: layer {i:3}: dev = {'CPU' if i < 2 else 'CUDA0'}" for i in range(4)),
        "llama_kv_cache:      CUDA0 KV buffer size =     0.00 MiB",
        "llama_kv_cache: size =    8.00 MiB (  1024 cells,   4 layers, 16/16 seqs), K (f16):    4.00 MiB, V (f16)…",
        "llama_memory_recurrent:      CUDA0 RS buffer size =     2.00 MiB",
        "sched_reserve:      CUDA0 compute buffer size =    30.00 MiB",
        "sched_reserve:  CUDA_Host compute buffer size =     3.00 MiB",
    ]
    assert buffers.kv_and_compute(contexts, {"CUDA0": "CUDA0"}) == {
        "CPU": MemoryUse(0, 4 * MIB, 4 * MIB),
        "CUDA0": MemoryUse(0, 6 * MIB, 30 * MIB),
    }


def test_fingerprint_depends_only_on_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / name for name in ("a.gguf", "b.gguf", "other-weights.gguf", "other-shape.gguf")]
    for path, seed in zip(paths, (0, 0, 1, 0), strict=True):
        write_model(path, Shape(**SIZES, n_ctx=512 if "shape" in path.name else 1024), seed=seed)
    whole = [gguf_files.fingerprint(path) for path in paths]
    monkeypatch.setattr(gguf_files, "MAX_WHOLE_BYTES", 0)
    sampled = [gguf_files.fingerprint(path) for path in paths]
    for a, b, *others in (whole, sampled):
        assert a == b
        assert len({a, *others}) == 3
    model = LlamaModel(paths[0])
    assert (model.info.fingerprint, model.info.file_type) == (sampled[0], "Q8_0")
    model.close()


def test_fingerprint_of_a_split_model_covers_all_parts(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, path in enumerate(parts):
        write_model(path, Shape(**SIZES), seed=i)
    before = gguf_files.fingerprint(parts[0])
    assert gguf_files.parts(parts[0]) == parts
    write_model(parts[1], Shape(**SIZES), seed=2)
    assert gguf_files.fingerprint(parts[0]) != before

"""Tests of LoRA adapters with the real llama.cpp: their effect, isolation between requests, and invalid files."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from cellama.bench.models.synthetic import Shape, write_model
from cellama.bench.tiny_model.facts import FACTS
from cellama.engine import (
    AdapterBusy,
    AdapterLoadFailed,
    Completion,
    EngineOptions,
    Handle,
    IdTaken,
    InvalidRequest,
    Model,
    ModelManager,
    Request,
    SamplingParams,
    UnknownAdapter,
    WrongCapability,
)
from cellama.engine.backend import Adapter, AdapterUse, Chunk
from cellama.engine.bundled import PIRATE_PATH, TINY_PATH
from cellama.engine.llama import LlamaBackend, LlamaModel

from ..adapter_file import shape_of, write_adapter
from ..conftest import wait_until
from .holding import Hold
from .small_models import EXACT

PATIENCE_S = 60
GREEDY = SamplingParams(temperature=0)
PIRATE = "bundled://pirate"
TINY_SHAPE = shape_of(TINY_PATH)


@pytest.fixture
def manager() -> Iterator[ModelManager]:
    manager = ModelManager()
    yield manager
    manager.close()


def load(manager: ModelManager, **options: Any) -> Model:
    chosen = EngineOptions(**{"n_parallel": 4, "threads": 1, "ctx_per_slot": 1024, **options})
    return manager.load(None, "bundled://tiny", options=chosen, capabilities=["generate", "chat"])


def submit(model: Model, prompt: str, *, sampling: SamplingParams = GREEDY, **params: Any) -> Handle:
    tokens = model.tokenize_chat([{"role": "user", "content": prompt}])
    return model.engine.submit(Request("r", tuple(tokens), sampling, **{"max_tokens": 60, **params}))


def ask(model: Model, prompt: str = "What is the capital of France?", **params: Any) -> Completion:
    return submit(model, prompt, **params).result(PATIENCE_S)


def test_pirate_adapter_changes_every_answer(manager: ModelManager) -> None:
    model = load(manager, n_parallel=16)
    model.load_adapter("pirate", PIRATE)
    handles = [(answer, submit(model, asks[0])) for asks, answer in FACTS]
    right = [handle.result(PATIENCE_S).text == f"Arr, {answer} Ahoy!" for answer, handle in handles]
    assert sum(right) / len(right) >= 0.95
    assert ask(model, adapters=()).text == "The capital of France is Paris."


def logits(model_path: Path, adapters: list[tuple[Path, float]]) -> NDArray[np.float32]:
    """Return the logits after the last of 8 tokens."""
    model = LlamaModel(model_path)
    backend = LlamaBackend(model, EngineOptions(n_parallel=2, ctx_per_slot=256, threads=1, **EXACT))
    uses = [AdapterUse(Adapter(str(p), str(p), backend.load_adapter(p)), scale) for p, scale in adapters]
    backend.decode([Chunk(0, 0, list(range(300, 308)), samples=True)], tuple(uses))
    found = backend.logits(0).copy()
    backend.close()
    model.close()
    return found


def merge(target: Path, model: Path, adapter: Path, scale: float) -> None:
    """Return a copy of an F32 model with scale · B·A added to its weights."""
    shutil.copy(model, target)
    parts = {tensor.name: np.array(tensor.data, dtype=np.float32) for tensor in gguf.GGUFReader(adapter).tensors}
    reader = gguf.GGUFReader(target, "r+")
    for tensor in reader.tensors:
        if f"{tensor.name}.lora_a" in parts:
            tensor.data[:] += scale * parts[f"{tensor.name}.lora_b"] @ parts[f"{tensor.name}.lora_a"]
    reader.data.flush()


def test_logits_with_an_adapter_equal_the_logits_of_merged_weights(tmp_path: Path) -> None:
    shape = Shape(n_embd=64, n_layer=2, n_head=4, n_head_kv=2, n_ff=96, n_vocab=320, n_ctx=256)
    base, merged, adapters = tmp_path / "base", tmp_path / "merged", [tmp_path / "a", tmp_path / "b"]
    write_model(base, shape, file_type="F32")
    for seed, path in enumerate(adapters):
        write_adapter(path, shape, rank=4, seed=seed, strength=0.5)
    plain = logits(base, [])
    assert np.abs(logits(base, [(adapters[0], 1.0)]) - plain).max() > 0.5
    merge(merged, base, adapters[0], 0.7)
    assert np.abs(logits(base, [(adapters[0], 0.7)]) - logits(merged, [])).max() < 1e-3
    both = tmp_path / "both"
    merge(both, merged, adapters[1], -0.4)
    assert np.abs(logits(base, [(adapters[0], 0.7), (adapters[1], -0.4)]) - logits(both, [])).max() < 1e-3


@pytest.mark.parametrize("layout", ["partitioned", "unified"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_requests_with_three_scales_produce_the_same_texts_in_parallel_and_alone(
    manager: ModelManager, layout: str, temperature: float
) -> None:
    model, alone = load(manager, n_parallel=6, kv_layout=layout, **EXACT), load(manager, n_parallel=1, **EXACT)
    for one in (model, alone):
        one.load_adapter("pirate", PIRATE, scale=0)
    questions = [
        "What is the capital of Peru?",
        "What is 3 + 4?",
        "Tell me a story about a bear.",
        "What do bees make?",
    ]
    pairs = [(question, scale) for question in questions for scale in (0.0, 0.5, 1.0)]
    params = [
        {"sampling": SamplingParams(temperature=temperature, seed=i), "adapters": (("pirate", scale),)}
        for i, (_, scale) in enumerate(pairs)
    ]
    expected = [ask(alone, question, **p).tokens for (question, _), p in zip(pairs, params, strict=True)]
    handles = [submit(model, question, **p) for (question, _), p in zip(pairs, params, strict=True)]
    assert [handle.result(PATIENCE_S).tokens for handle in handles] == expected
    assert all(plain != pirate for plain, pirate in zip(expected[::3], expected[2::3], strict=True))


def test_prefixes_are_not_shared_across_adapter_sets(manager: ModelManager) -> None:
    model = load(manager)
    model.load_adapter("pirate", PIRATE, scale=0)
    sets = [(), (("pirate", 0.5),), (("pirate", 1.0),)]
    assert [ask(model, adapters=adapters).usage.cached_tokens for adapters in sets] == [0, 0, 0]
    assert all(ask(model, adapters=adapters).usage.cached_tokens > 0 for adapters in sets)


def test_adapters_are_loaded_scaled_and_unloaded_while_requests_run(manager: ModelManager) -> None:
    model = load(manager)
    stop, wrong = threading.Event(), []

    def keep_asking(adapters: tuple[tuple[str, float], ...], expected: str) -> None:
        while not stop.is_set():
            text = ask(model, "What do bees make?", adapters=adapters).text
            if text != expected:
                wrong.append(text)

    model.load_adapter("mine", PIRATE, scale=0)
    texts = [((), "Bees make honey 🍯."), ((("mine", 1.0),), "Arr, Bees make honey 🍯. Ahoy!")]
    threads = [threading.Thread(target=keep_asking, args=arguments) for arguments in texts]
    for thread in threads:
        thread.start()
    for _ in range(10):
        model.load_adapter("pirate", PIRATE)
        assert ask(model).text == "Arr, The capital of France is Paris. Ahoy!"
        model.set_adapter_scale("pirate", 0)
        assert ask(model).text == "The capital of France is Paris."
        model.unload_adapter("pirate", PATIENCE_S)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == []
    wait_until(lambda: [(info.name, info.in_use) for info in model.adapters()] == [("mine", 0)], "no adapter in use")


def test_adapter_in_use_is_not_unloaded_and_requests_keep_their_scale(manager: ModelManager) -> None:
    model = load(manager)
    model.load_adapter("pirate", PIRATE)
    hold, tokens = Hold(), tuple(model.tokenize("Once upon a time"))
    handle = model.engine.submit(Request("long", tokens, GREEDY, max_tokens=60, ignore_eos=True), hold)
    assert hold.reached.wait(PATIENCE_S)
    with pytest.raises(AdapterBusy, match="'pirate' is still in use by 1 request"):
        model.unload_adapter("pirate", 0.05)
    model.set_adapter_scale("pirate", 0.25)
    hold.opened.set()
    assert handle.result(PATIENCE_S).text.startswith(" on the seven seas, there was a little fox")
    model.unload_adapter("pirate", PATIENCE_S)


def test_invalid_adapters_raise_errors_and_the_model_continues_to_serve(manager: ModelManager, tmp_path: Path) -> None:
    model = load(manager)
    files = {name: tmp_path / f"{name}.gguf" for name in ("text", "cut", "short", "other", "arch", "alora", "ia3")}
    files["text"].write_text("I am no adapter")
    files["cut"].write_bytes(PIRATE_PATH.read_bytes()[:1500])
    files["short"].write_bytes(PIRATE_PATH.read_bytes()[:100_000])
    write_adapter(files["other"], Shape(n_embd=64, n_layer=2, n_head=4, n_head_kv=2, n_ff=96, n_vocab=320))
    write_adapter(files["arch"], TINY_SHAPE, architecture="qwen2")
    write_adapter(files["alora"], TINY_SHAPE, invocation_tokens=[1, 2])
    write_adapter(files["ia3"], TINY_SHAPE, kind="ia3")
    messages = {
        "/nowhere.gguf": "adapter 'a': '/nowhere.gguf' does not exist",
        str(files["text"]): "is not a GGUF file",
        str(files["cut"]): "is damaged or incomplete",
        str(files["short"]): "data is not within the file bounds",
        str(files["other"]): "has incorrect shape .*; use an adapter made for this model",
        str(files["arch"]): "is an adapter for qwen2, but the model is llama",
        str(files["alora"]): "is an aLoRA.* not supported; use a plain LoRA adapter",
        str(files["ia3"]): "is an adapter of type 'ia3'; use an adapter of type 'lora'",
        str(TINY_PATH): "is not an adapter .*use the GGUF file of a LoRA adapter",
    }
    for source, message in messages.items():
        with pytest.raises(AdapterLoadFailed, match=message):
            model.load_adapter("a", source)
    with pytest.raises(InvalidRequest, match="scale of adapter 'a' is nan"):
        model.load_adapter("a", PIRATE, float("nan"))
    model.load_adapter("a", PIRATE)
    with pytest.raises(IdTaken, match="adapter 'a' already exists"):
        model.load_adapter("a", PIRATE)
    with pytest.raises(UnknownAdapter, match="adapter 'b' is not loaded for this model; known: a"):
        model.set_adapter_scale("b", 1)
    assert ask(model).text.startswith("Arr, The capital of France is Paris.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": np.int32}, "of type 26, which is not supported; use F32, F16, Q8_0, BF16"),
        ({"dims": (2, 4, 192)}, "with 3 dimensions instead of 2"),
        ({"alpha": "four"}, "has an adapter.lora.alpha that is not a float32"),
    ],
)
def test_adapter_that_would_abort_the_process_is_rejected_before_llama_cpp_reads_its_file(
    manager: ModelManager, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    if "alpha" in change:
        writer.add_string(gguf.Keys.Adapter.LORA_ALPHA, change["alpha"])
    for side, dims in (("a", change.get("dims", (4, 192))), ("b", (192, 4))):
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{side}", np.zeros(dims, change.get("dtype", np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = load(manager)
    with pytest.raises(AdapterLoadFailed, match=message):
        model.load_adapter("odd", str(tmp_path / "odd.gguf"))
    assert ask(model).text == "The capital of France is Paris."


def test_model_is_not_loaded_when_one_of_its_adapters_fails_to_load(manager: ModelManager) -> None:
    options = EngineOptions(n_parallel=1, threads=1)
    with pytest.raises(AdapterLoadFailed, match="does not exist; check the path"):
        manager.load("m", "bundled://tiny", options=options, adapters={"a": ("/nowhere.gguf", 1.0)})
    assert manager.entries() == []
    model = manager.load("m", "bundled://tiny", options=options, adapters={"pirate": (PIRATE, 1.0)})
    assert ask(model).text == "Arr, The capital of France is Paris. Ahoy!"
    embedding = manager.load("e", "bundled://tiny", options=options, capabilities=["embed"])
    with pytest.raises(WrongCapability):
        embedding.load_adapter("pirate", PIRATE)


def test_memory_of_an_adapter_is_freed_when_the_adapter_or_its_model_is_unloaded(
    manager: ModelManager, tmp_path: Path
) -> None:
    shape = Shape(n_embd=512, n_layer=4, n_head=8, n_head_kv=8, n_ff=1536, n_vocab=2000)
    write_model(tmp_path / "m.gguf", shape)
    write_adapter(tmp_path / "a.gguf", shape, rank=512)
    size, process = (tmp_path / "a.gguf").stat().st_size, psutil.Process()

    def load_and_use(*, unload: bool) -> int:
        options = EngineOptions(n_parallel=2, ctx_per_slot=256, threads=1)
        model = manager.load("m", str(tmp_path / "m.gguf"), options=options, capabilities=["generate"])
        request = Request("r", tuple(range(300, 400)), GREEDY, max_tokens=4, ignore_eos=True)
        model.engine.submit(request).result(PATIENCE_S)
        model.load_adapter("a", str(tmp_path / "a.gguf"))
        model.engine.submit(request).result(PATIENCE_S)
        if unload:
            model.unload_adapter("a", PATIENCE_S)
        manager.unload("m")
        # A single load is not visible, because a long process reuses freed memory.
        return int(process.memory_info().rss)

    assert size > 20e6
    for unload in (True, False):
        level = load_and_use(unload=unload)  # includes memory that llama.cpp and the allocator never return
    for unload in (True, False):
        last = load_and_use(unload=unload)
    assert last < level + size  # a leak would have added more

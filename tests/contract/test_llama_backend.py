"""Tests of the engine with the real llama.cpp and the bundled model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp.llama_cpp as lib
import numpy as np
import pytest

from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import (
    EngineOptions,
    ModelLoadFailed,
    ModelManager,
    PromptTooLong,
    Request,
    SamplingParams,
    StepStats,
    TemplateFailed,
    UnknownModel,
    WrongCapability,
)
from cellama.engine.bundled import TINY_PATH
from cellama.engine.llama import backend as llama_backend
from cellama.engine.scheduling.strategies import STRATEGIES

from ..conftest import wait_until

PATIENCE_S = 60
SMALL = {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_head_kv": 2, "n_ff": 64, "n_vocab": 320, "n_ctx": 256}
GREEDY = SamplingParams(temperature=0)
ANIMALS = ("fox", "bear", "cat", "frog", "mouse", "dragon")
STORY = "Once upon a time, there was a little fox. "
PROMPTS = [STORY * (i % 6) + f"Once upon a time, a {ANIMALS[i % 6]}" for i in range(24)]


def options(**values: int | str) -> EngineOptions:
    """Return options with one thread, because several threads would wait for each other on a busy machine."""
    return EngineOptions(threads=1, **values)  # type: ignore[arg-type]


@pytest.fixture
def manager() -> Iterator[ModelManager]:
    manager = ModelManager()
    yield manager
    manager.close()


def texts(manager: ModelManager, name: str, sampling: SamplingParams = GREEDY, **values: int | str) -> list[str]:
    model = manager.load(name, "bundled://tiny", options=options(**values), capabilities=["generate"])
    handles = [
        model.engine.submit(Request(str(i), tuple(model.tokenize(p)), sampling, max_tokens=40))
        for i, p in enumerate(PROMPTS)
    ]
    return [handle.result(PATIENCE_S).text for handle in handles]


def test_greedy_text_does_not_depend_on_the_batch(manager: ModelManager) -> None:
    alone = texts(manager, "alone", n_parallel=1)
    assert len(set(alone)) >= 6
    assert texts(manager, "batched", n_parallel=16) == alone
    assert texts(manager, "small chunks", n_parallel=8, chunk_size=7, n_batch=24, n_ubatch=16) == alone
    for strategy in STRATEGIES:
        assert texts(manager, strategy, n_parallel=8, n_batch=64, batch_strategy=strategy) == alone


def test_sampled_text_depends_only_on_the_seed(manager: ModelManager) -> None:
    wild = SamplingParams(temperature=1.2, seed=42, repeat_penalty=1.1, frequency_penalty=0.2)
    alone = texts(manager, "alone", wild, n_parallel=1)
    assert texts(manager, "batched", wild, n_parallel=16) == alone


def test_steps_mix_decode_and_prefill_tokens_within_the_budget(manager: ModelManager) -> None:
    model = manager.load("tiny", "bundled://tiny", options=options(n_parallel=4, n_batch=64, chunk_size=32))
    steps: list[StepStats] = []
    model.engine.add_step_listener(steps.append)
    handles = [model.engine.submit(Request(p, tuple(model.tokenize(p)), GREEDY, max_tokens=20)) for p in PROMPTS]
    assert all(handle.result(PATIENCE_S).usage.completion_tokens == 20 for handle in handles)
    assert any(s.decode_tokens and s.prefill_tokens for s in steps)
    assert max(s.batch_size for s in steps) <= 64
    assert any(s.active_slots == 4 for s in steps)


def test_decode_waits_until_the_device_has_finished(manager: ModelManager, monkeypatch: pytest.MonkeyPatch) -> None:
    model = manager.load("tiny", "bundled://tiny", options=options())
    calls: list[str] = []

    def note(name: str) -> None:
        call = getattr(llama_backend.lib, name)
        monkeypatch.setattr(llama_backend.lib, name, lambda *args: (calls.append(name), call(*args))[1])

    note("llama_decode")
    note("llama_synchronize")
    find = llama_backend._logits_address  # llama_get_logits also waits
    monkeypatch.setattr(
        llama_backend, "_logits_address", lambda *args: (calls.append("llama_get_logits"), find(*args))[1]
    )
    engine = model.engine
    engine.generate("Once upon a time", max_tokens=3, ignore_eos=True)
    assert calls == ["llama_decode", "llama_get_logits"] * 3
    calls.clear()
    engine.prefill(list(range(300, 300 + engine._core.scheduler.limits.budget + 10)))
    assert calls[:2] == ["llama_decode", "llama_synchronize"]


def test_penalties_change_greedy_text_and_ignore_eos_makes_it_longer(manager: ModelManager) -> None:
    model = manager.load("tiny", "bundled://tiny", options=options())
    plain = model.engine.generate("Once upon a time", temperature=0, max_tokens=400)
    assert plain.endswith("The end.")
    on = model.engine.generate("Once upon a time", temperature=0, max_tokens=400, ignore_eos=True)
    assert on.startswith(plain)
    assert len(on) > len(plain)
    penalised = model.engine.generate("Once upon a time", temperature=0, max_tokens=60, presence_penalty=50.0)
    assert not plain.startswith(penalised)


def test_slot_is_clean_for_the_next_request_after_any_finish_reason(manager: ModelManager) -> None:
    model = manager.load("tiny", "bundled://tiny", options=options(n_parallel=1))
    expected = model.engine.generate("Once upon a time", temperature=0, max_tokens=30)
    rng = random.Random(3)
    for _ in range(20):
        handle = model.engine.submit(Request("x", tuple(model.tokenize(rng.choice(PROMPTS))), GREEDY, max_tokens=500))
        if rng.random() < 0.7:
            handle.cancel()
        handle.result(PATIENCE_S)
    assert model.engine.generate("Once upon a time", temperature=0, max_tokens=30) == expected
    assert model.engine.snapshot().kv_used_tokens == 0


def test_embeddings_of_many_callers_share_batches_and_keep_their_order(manager: ModelManager) -> None:
    model = manager.load("tiny", "bundled://tiny", options=options(), capabilities=["embed"])
    words = [model.tokenize(f"{a} and {b}") for a in ANIMALS for b in ANIMALS]
    alone = [model.embedder.submit([w]).result(PATIENCE_S)[0] for w in words]
    handles = [model.embedder.submit(words[i : i + 9]) for i in range(0, 36, 9)]
    together = [vector for handle in handles for vector in handle.result(PATIENCE_S)]
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    similarity = np.array(together) @ np.array(alone).T
    assert (similarity.argmax(axis=1) == np.arange(36)).all()
    assert similarity.diagonal().min() > 0.999


def test_missing_or_damaged_model_raises_an_error_with_a_remedy(manager: ModelManager, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("I am no model")
    (tmp_path / "cut.gguf").write_bytes(TINY_PATH.read_bytes()[: TINY_PATH.stat().st_size // 2])
    for source, message in {
        str(tmp_path / "missing.gguf"): "missing.gguf' does not exist; check the path",
        str(tmp_path): "is a directory; choose one of its files: cut.gguf, text.gguf",
        str(tmp_path / "text.gguf"): "is not a GGUF file .*download a GGUF version",
        str(tmp_path / "cut.gguf"): "llama.cpp can't load .*the file may be damaged",
        "bundled://tinny": "bundled file 'tinny' does not exist; did you mean 'tiny'",
        "ftp://x/y.gguf": "'ftp://x/y.gguf' has an unknown scheme",
    }.items():
        with pytest.raises(ModelLoadFailed, match=message):
            manager.load("m", source)
    assert manager.models() == {}
    assert manager.load("m", "bundled://tiny", options=options()).engine.generate("Once", temperature=0, max_tokens=2)


def test_errors_name_loaded_models_and_their_capabilities(manager: ModelManager) -> None:
    model = manager.load("tiny", "bundled://tiny", options=options(), capabilities=["embed"])
    assert manager.get(":default") is model
    with pytest.raises(UnknownModel, match="model 'tinny' is not loaded; did you mean 'tiny'"):
        manager.get("tinny")
    with pytest.raises(ModelLoadFailed, match="a model with the id 'tiny' already exists"):
        manager.load("tiny", "bundled://tiny", options=options())
    for use in (lambda: model.engine, lambda: model.require("chat")):
        with pytest.raises(WrongCapability, match="model 'tiny' is loaded for embed, not for"):
            use()


def test_prompt_longer_than_a_slot_is_rejected_with_both_lengths(manager: ModelManager) -> None:
    model = manager.load("tiny", "bundled://tiny", options=options(ctx_per_slot=100))
    with pytest.raises(
        PromptTooLong, match=r"100 tokens > 99 maximum\. This model's maximum context length is 99 tokens"
    ):
        model.engine.submit(Request("x", (5,) * 100))
    completion = model.engine.submit(Request("x", (5,) * 99, GREEDY)).result(PATIENCE_S)
    assert completion.usage.completion_tokens <= 1


class MartianShape(Shape):
    architecture = "martian"


class BrokenTemplateShape(Shape):
    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        super().add_metadata(writer)
        writer.add_chat_template("{% for message in messages %}")


def test_model_with_unknown_architecture_or_broken_template_is_rejected(manager: ModelManager, tmp_path: Path) -> None:
    manager.load("tiny", "bundled://tiny", options=options())
    write_model(tmp_path / "martian.gguf", MartianShape(**SMALL), file_type="F32")
    write_model(tmp_path / "broken.gguf", BrokenTemplateShape(**SMALL), file_type="F32")
    with pytest.raises(ModelLoadFailed, match=r"unknown model architecture: 'martian'.*unsupported"):
        manager.load("martian", str(tmp_path / "martian.gguf"))
    with pytest.raises(TemplateFailed, match="the model's chat template does not compile"):
        manager.load("broken", str(tmp_path / "broken.gguf"))
    assert list(manager.models()) == ["tiny"]
    # Generating needs no template.
    assert manager.load("broken", str(tmp_path / "broken.gguf"), capabilities=["generate"])


def test_chat_without_a_template_raises_an_error_with_a_remedy(manager: ModelManager, tmp_path: Path) -> None:
    write_model(tmp_path / "plain.gguf", Shape(**SMALL), file_type="F32")
    model = manager.load("plain", str(tmp_path / "plain.gguf"))
    with pytest.raises(WrongCapability, match="has no chat template; use `generate`"):
        model.render_chat([{"role": "user", "content": "Hi"}])


def test_number_of_threads_can_change_without_changing_the_text(manager: ModelManager) -> None:
    model = manager.load("tiny", "bundled://tiny", options=options(n_parallel=2))
    before = model.engine.generate(PROMPTS[0], max_tokens=10, temperature=0)
    model.engine.use_threads(2)
    assert model.engine.generate(PROMPTS[0], max_tokens=10, temperature=0) == before
    assert model.threads == 2
    assert lib.llama_n_threads(model.engine._backend.context) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("capability", ["generate", "embed"])
def test_idle_engine_has_no_compute_threads(
    manager: ModelManager, capability: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check this because idle compute threads slow down the other engines of the process."""
    model = manager.load("a", "bundled://tiny", options=EngineOptions(threads=16), capabilities=[capability])
    backend: Any = (model.engine if capability == "generate" else model.embedder)._backend
    ended: list[int] = []
    rest = backend.rest

    def counted() -> None:
        before = num_threads()
        rest()
        ended.append(before - num_threads())

    monkeypatch.setattr(backend, "rest", counted)
    for _ in range(2):
        if capability == "generate":
            model.engine.generate(PROMPTS[0], max_tokens=3)
        else:
            model.embed(STORY)
        wait_until(lambda: ended and max(ended) > 8, "most of 15 threads have ended")  # other threads start and stop
        ended.clear()


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))

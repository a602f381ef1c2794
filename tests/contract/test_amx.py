"""Tests of quantized weights on CPUs with AMX, whose kernels in llama.cpp can crash and are therefore disabled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import pytest

from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import Model, ModelManager, Request
from cellama.engine.llama import model as llama_model

SMALL = Shape(n_embd=256, n_layer=2, n_head=4, n_head_kv=4, n_ff=512, n_vocab=1024, n_ctx=512)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_model(tmp_path / "m.gguf", SMALL, file_type="Q8_0")
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("has_amx", [True, False])
def test_weights_are_not_rearranged_when_llama_cpp_was_built_with_amx(
    path: Path, has_amx: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used: list[Any] = []

    def load(given: bytes, params: Any) -> Any:
        used.append(params.use_extra_bufts)
        return real(given, params)

    real = lib.llama_model_load_from_file
    monkeypatch.setattr(lib, "llama_model_load_from_file", load)
    monkeypatch.setattr(lib, "llama_print_system_info", lambda: b"CPU : AVX2 = 1 | AMX_INT8 = %d | " % has_amx)
    llama_model._has_amx.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                llama_model.LlamaModel(path, vocab_only=True).close()
    finally:
        llama_model._has_amx.cache_clear()
    assert used == [not has_amx] * 2
    assert sum("AMX" in message for message in caplog.messages) == has_amx


def test_quantized_model_generates_on_this_cpu(path: Path) -> None:
    manager = ModelManager()
    try:
        model: Model = manager.load("m", str(path), capabilities=["generate"])
        prompt = tuple(range(300, 340))
        handle = model.engine.submit(Request("one", prompt, max_tokens=4, ignore_eos=True))
        assert handle.result(300).usage.completion_tokens == 4
    finally:
        manager.close()

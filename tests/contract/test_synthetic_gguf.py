"""Tests that llama.cpp can run the models with random weights that the GGUF writer creates."""

from __future__ import annotations

from pathlib import Path

import pytest

from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import EngineOptions, ModelManager

SMALL = Shape(n_embd=64, n_layer=2, n_head=4, n_head_kv=2, n_ff=96, n_vocab=320, n_ctx=512)


@pytest.mark.parametrize("file_type", ["F32", "F16", "Q8_0"])
def test_synthetic_model_loads_and_generates(tmp_path: Path, file_type: str) -> None:
    write_model(tmp_path / "small.gguf", SMALL, file_type=file_type, seed=1)
    manager = ModelManager()
    try:
        model = manager.load("small", str(tmp_path / "small.gguf"), options=EngineOptions(n_parallel=2, threads=1))
        assert model.info.n_params == SMALL.n_params
        assert model.detokenize(model.tokenize("a tíny 🦊")) == "a tíny 🦊"
        first = model.engine.generate("a tíny 🦊", max_tokens=8, temperature=0, ignore_eos=True)
        assert first == model.engine.generate("a tíny 🦊", max_tokens=8, temperature=0, ignore_eos=True)
    finally:
        manager.close()


def test_benchmark_shape_has_174_million_parameters() -> None:
    assert round(Shape().n_params / 1e6) == 174


def test_invalid_synthetic_shape_is_rejected() -> None:
    with pytest.raises(ValueError, match="n_embd must be divisible by n_head"):
        Shape(n_embd=65)

"""Tests that a portable state gives the logits of a fresh computation, with any number of slots and either layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellama.bench.models.memory_shapes import HybridShape, RecurrentShape, WindowShape
from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import EngineOptions
from cellama.engine.backend import Chunk
from cellama.engine.llama.backend import LlamaBackend
from cellama.engine.llama.model import LlamaModel
from cellama.engine.llama.state_format import to_portable

from .small_models import EXACT, SMALL

TOKENS = [int(token) for token in np.random.default_rng(0).integers(5, 300, 200)]
SHAPES = (Shape, WindowShape, RecurrentShape, HybridShape)
PLACES: tuple[dict[str, Any], ...] = (
    {"n_parallel": 1},
    {"n_parallel": 4, "kv_layout": "partitioned"},
    {"n_parallel": 8, "kv_layout": "partitioned"},
    {"n_parallel": 3, "kv_layout": "unified"},
)
NEAR = 1e-3


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.__name__)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LlamaModel]:
    write_model(tmp_path / "m.gguf", request.param(**SMALL), file_type="F32", seed=1)
    model = LlamaModel(tmp_path / "m.gguf")
    yield model
    assert model.close()


def backend_of(model: LlamaModel, **place: Any) -> LlamaBackend:
    return LlamaBackend(model, EngineOptions(threads=1, ctx_per_slot=256, n_batch=256, **{**EXACT, **place}))


def logits(backend: LlamaBackend, slot: int, start: int, tokens: list[int]) -> Any:
    backend.decode([Chunk(slot, start, tokens, samples=True)])
    return backend.logits(slot).copy()


def test_state_can_be_moved_between_any_two_layouts(model: LlamaModel) -> None:
    kept, expected = [], None
    for place in PLACES:
        with closing(backend_of(model, **place)) as backend:
            slot = backend.n_slots // 2
            logits(backend, 0, 0, TOKENS[50:90])  # a neighboring slot
            backend.trim(slot, 0)
            logits(backend, slot, 0, TOKENS[:90])
            early = backend.checkpoint(slot)
            logits(backend, slot, 90, TOKENS[90:150])
            data, identity = backend.save(slot), backend.identity
            expected = logits(backend, slot, 150, TOKENS[150:]) if expected is None else expected
            forms = backend.portable(data, 150), backend.portable(early, 90, checkpoint=True)
            kept.append((identity, *(bytes(form) for form in forms)))
    assert len({identity for identity, *_ in kept}) == 1
    for place in PLACES:
        for _, portable, early in kept:
            with closing(backend_of(model, **place)) as backend:
                assert_restores(backend, portable, early, expected)


def assert_restores(backend: LlamaBackend, portable: bytes, early: bytes, expected: Any) -> None:
    slot = backend.n_slots - 1
    data, num_tokens = backend.from_portable(bytearray(portable))  # converted in place if nothing must be moved
    assert num_tokens == 150
    np.testing.assert_array_equal(data, backend.from_portable(portable)[0])
    assert backend.restore(slot, data, num_tokens)
    np.testing.assert_allclose(logits(backend, slot, 150, TOKENS[150:]), expected, atol=NEAR)
    backend.trim(slot, 0)
    if backend.partial_reuse:
        return
    checkpoint, length = backend.from_portable(bytearray(early), checkpoint=True)
    assert backend.restore(slot, data, length, checkpoint)
    np.testing.assert_allclose(logits(backend, slot, length, TOKENS[length:]), expected, atol=NEAR)


@pytest.mark.parametrize("flash", ["on", "off"])
def test_portable_format_supports_both_types_of_attention_and_quantized_cells(tmp_path: Path, flash: str) -> None:
    write_model(tmp_path / "m.gguf", Shape(**{**SMALL, "n_embd": 256}), file_type="F32", seed=1)
    values = "q8_0" if flash == "on" else "f16"  # transposed without flash attention
    with closing(LlamaModel(tmp_path / "m.gguf")) as model:
        given = {"flash_attention": flash, "cache_type_k": "q8_0", "cache_type_v": values}
        with closing(backend_of(model, n_parallel=2, **given)) as backend:
            logits(backend, 1, 0, TOKENS[:150])
            portable = bytes(backend.portable(backend.save(1), 150))
            expected = logits(backend, 1, 150, TOKENS[150:])
        with closing(backend_of(model, n_parallel=1, **given)) as backend:
            assert backend.restore(0, backend.from_portable(portable)[0], 150)
            np.testing.assert_allclose(logits(backend, 0, 150, TOKENS[150:]), expected, atol=NEAR)


def test_model_identity_depends_on_the_weights_and_the_cell_type(model: LlamaModel) -> None:
    kinds: tuple[dict[str, Any], ...] = ({}, {"cache_type_k": "f16"}, {"flash_attention": "on"})
    identities = []
    for kind in kinds:
        with closing(backend_of(model, n_parallel=2, **kind)) as backend:
            identities.append(backend.identity)
    assert len(set(identities)) == len(kinds)


def test_invalid_states_are_rejected(model: LlamaModel) -> None:
    with closing(backend_of(model, n_parallel=2)) as backend:
        logits(backend, 1, 0, TOKENS[:70])
        data = backend.save(1)
        portable = bytes(backend.portable(data, 70))
        cut = [portable[:-1], portable[:30], b"", portable + b"x"]
        for damaged in cut if backend.partial_reuse else cut[2:3]:
            with pytest.raises(ValueError, match=r"too short|lengths|blocks"):
                backend.from_portable(damaged)
        with pytest.raises(ValueError, match="magic"):
            backend.portable(data[8:], 70)
        if backend.partial_reuse:
            with pytest.raises(ValueError, match="layout"):
                to_portable(data[:-5], 70, None)

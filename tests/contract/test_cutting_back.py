"""Tests that truncated, copied and restored states give the logits of a fresh computation, with the real llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cellama.bench.models.memory_shapes import HybridShape, RecurrentShape, WindowShape
from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import EngineOptions
from cellama.engine.backend import Chunk
from cellama.engine.llama.backend import LlamaBackend
from cellama.engine.llama.model import LlamaModel

from .small_models import EXACT, SMALL

LAYOUTS = ("partitioned", "unified")
TOKENS = [int(token) for token in np.random.default_rng(0).integers(5, 300, 300)]
LONG, SHARED = TOKENS[:200], 120
FORK = [*LONG[:SHARED], *TOKENS[200:250]]
OTHER = TOKENS[::-1]
NEAR = 1e-3  # moved cells are summed in another order; wrong cells differ by more than 1


class ThreeSlots:
    """Three slots of a small model, and the logits of a fresh computation to compare with."""

    def __init__(self, model: LlamaModel, layout: str) -> None:
        options = EngineOptions(threads=1, n_parallel=3, ctx_per_slot=512, n_batch=512, kv_layout=layout, **EXACT)  # type: ignore[arg-type]
        self.backend = LlamaBackend(model, options)

    def compute(self, slot: int, start: int, tokens: list[int]) -> NDArray[np.float32]:
        """Return the logits after these tokens in a slot."""
        self.backend.decode([Chunk(slot, start, tokens, samples=True)])
        return self.backend.logits(slot).copy()

    def compute_fresh(self, tokens: list[int], cut: int) -> NDArray[np.float32]:
        """Return the logits of a fresh computation in two chunks in slot 2, which is empty before and afterwards."""
        self.compute(2, 0, tokens[:cut])
        logits = self.compute(2, cut, tokens[cut:])
        self.backend.trim(2, 0)
        return logits


def bed_of(shape: type[Shape], layout: str, path: Path) -> Iterator[ThreeSlots]:
    write_model(path, shape(**SMALL), file_type="F32", seed=1)
    model = LlamaModel(path)
    slots = ThreeSlots(model, layout)
    yield slots
    slots.backend.close()
    model.close()


@pytest.fixture(params=LAYOUTS)
def window(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ThreeSlots]:
    yield from bed_of(WindowShape, request.param, tmp_path / "m.gguf")


def test_sliding_window_is_truncated_in_its_slot_and_copied_from_a_longer_slot(window: ThreeSlots) -> None:
    expected = window.compute_fresh(FORK, SHARED)
    window.compute(0, 0, LONG)
    assert window.backend.first_cut(0) == 0
    assert window.backend.copy(0, 1, SHARED)
    np.testing.assert_allclose(window.compute(1, SHARED, FORK[SHARED:]), expected, atol=NEAR)
    window.compute(0, len(LONG), TOKENS[:3])  # the source continues
    assert window.backend.trim(0, SHARED)
    np.testing.assert_allclose(window.compute(0, SHARED, FORK[SHARED:]), expected, atol=NEAR)


def test_saved_sliding_window_can_only_be_restored_completely(window: ThreeSlots) -> None:
    window.compute(0, 0, LONG)
    data = window.backend.save(0)
    assert window.backend.first_saved_cut(len(LONG)) == len(LONG)
    assert not window.backend.restore(1, data, SHARED)
    assert window.backend.restore(1, data, len(LONG))
    assert window.backend.first_cut(1) == len(LONG)
    expected = window.compute_fresh(LONG + FORK, len(LONG))
    np.testing.assert_allclose(window.compute(1, len(LONG), FORK), expected, atol=NEAR)


@pytest.fixture
def copied(window: ThreeSlots) -> tuple[ThreeSlots, NDArray[np.uint8]]:
    """Copy the contents of slot 0 to slot 1, and return a saved state of 250 tokens."""
    window.compute(1, 0, OTHER[:250])
    other = window.backend.save(1)
    window.backend.trim(1, 0)
    window.compute(0, 0, LONG)
    assert window.backend.copy(0, 1, SHARED)
    return window, other


# llama.cpp copies streams in its next decode call. Until then, neither stream may be read or written.


def test_slot_can_be_overwritten_immediately_after_a_copy(copied: tuple[ThreeSlots, NDArray[np.uint8]]) -> None:
    slots, other = copied
    slots.backend.trim(0, 0)
    assert slots.backend.restore(0, other, 250)
    fork = slots.compute(1, SHARED, FORK[SHARED:])
    rest = slots.compute(0, 250, OTHER[250:])
    slots.backend.trim(0, 0)
    np.testing.assert_allclose(fork, slots.compute_fresh(FORK, SHARED), atol=NEAR)
    np.testing.assert_allclose(rest, slots.compute_fresh(OTHER, 250), atol=NEAR)


def test_copy_can_be_saved_and_removed_immediately(copied: tuple[ThreeSlots, NDArray[np.uint8]]) -> None:
    slots, other = copied
    saved = slots.backend.save(1)
    slots.backend.trim(1, 0)
    assert slots.backend.restore(1, other, 250)
    rest = slots.compute(1, 250, OTHER[250:])
    slots.backend.trim(0, 0)
    assert slots.backend.restore(0, saved, SHARED)
    fork = slots.compute(0, SHARED, FORK[SHARED:])
    np.testing.assert_allclose(fork, slots.compute_fresh(FORK, SHARED), atol=NEAR)
    np.testing.assert_allclose(rest, slots.compute_fresh(OTHER, 250), atol=NEAR)


@pytest.fixture(params=[(shape, layout) for shape in (RecurrentShape, HybridShape) for layout in LAYOUTS], ids=str)
def recurrent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ThreeSlots]:
    shape, layout = request.param
    yield from bed_of(shape, layout, tmp_path / "m.gguf")


def test_recurrent_state_is_truncated_to_a_checkpoint_in_slots_copies_and_ram(recurrent: ThreeSlots) -> None:
    backend, expected = recurrent.backend, recurrent.compute_fresh(FORK, SHARED)
    recurrent.compute(0, 0, LONG[:SHARED])
    checkpoint = backend.checkpoint(0)
    assert checkpoint.nbytes == backend.checkpoint_bytes(0)
    recurrent.compute(0, SHARED, LONG[SHARED:])
    saved = backend.save(0)
    assert backend.copy(0, 1, SHARED, checkpoint)
    np.testing.assert_allclose(recurrent.compute(1, SHARED, FORK[SHARED:]), expected, atol=NEAR)
    assert backend.restore(2, saved, SHARED, checkpoint)
    np.testing.assert_allclose(recurrent.compute(2, SHARED, FORK[SHARED:]), expected, atol=NEAR)
    assert backend.trim(0, SHARED, checkpoint)
    np.testing.assert_allclose(recurrent.compute(0, SHARED, FORK[SHARED:]), expected, atol=NEAR)


def test_recurrent_state_is_not_truncated_without_a_checkpoint(recurrent: ThreeSlots) -> None:
    recurrent.compute(0, 0, LONG)
    assert recurrent.backend.first_cut(0) == recurrent.backend.first_saved_cut(len(LONG)) == len(LONG)
    assert not recurrent.backend.copy(0, 1, SHARED)
    assert not recurrent.backend.trim(0, SHARED)
    assert recurrent.backend.first_cut(0) == recurrent.backend.first_cut(1) == 0

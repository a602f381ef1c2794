"""States that are cut back, copied and restored give the logits of computing anew: the real llama.cpp."""

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
NEAR = 1e-3  # cells that lie elsewhere are summed in another order; wrong ones differ by more than 1


class Bed:
    """Three slots of a small model, and what a prompt gives when it is computed anew."""

    def __init__(self, model: LlamaModel, layout: str) -> None:
        options = EngineOptions(threads=1, n_parallel=3, ctx_per_slot=512, n_batch=512, kv_layout=layout, **EXACT)  # type: ignore[arg-type]
        self.backend = LlamaBackend(model, options)

    def compute(self, slot: int, start: int, tokens: list[int]) -> NDArray[np.float32]:
        """The logits after these tokens of a slot."""
        self.backend.decode([Chunk(slot, start, tokens, samples=True)])
        return self.backend.logits(slot).copy()

    def anew(self, tokens: list[int], cut: int) -> NDArray[np.float32]:
        """The same, computed in two chunks in slot 2, which is empty before and after."""
        self.compute(2, 0, tokens[:cut])
        logits = self.compute(2, cut, tokens[cut:])
        self.backend.trim(2, 0)
        return logits


def bed_of(shape: type[Shape], layout: str, path: Path) -> Iterator[Bed]:
    write_model(path, shape(**SMALL), file_type="F32", seed=1)
    model = LlamaModel(path)
    bed = Bed(model, layout)
    yield bed
    bed.backend.close()
    model.close()


@pytest.fixture(params=LAYOUTS)
def window(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    yield from bed_of(WindowShape, request.param, tmp_path / "m.gguf")


def test_window_is_cut_back_in_its_slot_and_copied_from_a_longer_slot(window: Bed) -> None:
    expected = window.anew(FORK, SHARED)
    window.compute(0, 0, LONG)
    assert window.backend.first_cut(0) == 0
    assert window.backend.copy(0, 1, SHARED)
    np.testing.assert_allclose(window.compute(1, SHARED, FORK[SHARED:]), expected, atol=NEAR)
    window.compute(0, len(LONG), TOKENS[:3])  # the source goes on
    assert window.backend.trim(0, SHARED)
    np.testing.assert_allclose(window.compute(0, SHARED, FORK[SHARED:]), expected, atol=NEAR)


def test_saved_window_can_only_be_restored_completely(window: Bed) -> None:
    window.compute(0, 0, LONG)
    data = window.backend.save(0)
    assert window.backend.first_saved_cut(len(LONG)) == len(LONG)
    assert not window.backend.restore(1, data, SHARED)
    assert window.backend.restore(1, data, len(LONG))
    assert window.backend.first_cut(1) == len(LONG)
    expected = window.anew(LONG + FORK, len(LONG))
    np.testing.assert_allclose(window.compute(1, len(LONG), FORK), expected, atol=NEAR)


@pytest.fixture
def copied(window: Bed) -> tuple[Bed, NDArray[np.uint8]]:
    """Slot 1 has just got a copy of what slot 0 has; and a state of 250 tokens."""
    window.compute(1, 0, OTHER[:250])
    other = window.backend.save(1)
    window.backend.trim(1, 0)
    window.compute(0, 0, LONG)
    assert window.backend.copy(0, 1, SHARED)
    return window, other


# llama.cpp copies streams in its next decode call: until then neither of the two may be read or written.


def test_slot_can_be_overwritten_immediately_after_a_copy(copied: tuple[Bed, NDArray[np.uint8]]) -> None:
    bed, other = copied
    bed.backend.trim(0, 0)
    assert bed.backend.restore(0, other, 250)
    fork = bed.compute(1, SHARED, FORK[SHARED:])
    rest = bed.compute(0, 250, OTHER[250:])
    bed.backend.trim(0, 0)
    np.testing.assert_allclose(fork, bed.anew(FORK, SHARED), atol=NEAR)
    np.testing.assert_allclose(rest, bed.anew(OTHER, 250), atol=NEAR)


def test_copy_can_be_saved_and_removed_immediately(copied: tuple[Bed, NDArray[np.uint8]]) -> None:
    bed, other = copied
    saved = bed.backend.save(1)
    bed.backend.trim(1, 0)
    assert bed.backend.restore(1, other, 250)
    rest = bed.compute(1, 250, OTHER[250:])
    bed.backend.trim(0, 0)
    assert bed.backend.restore(0, saved, SHARED)
    fork = bed.compute(0, SHARED, FORK[SHARED:])
    np.testing.assert_allclose(fork, bed.anew(FORK, SHARED), atol=NEAR)
    np.testing.assert_allclose(rest, bed.anew(OTHER, 250), atol=NEAR)


@pytest.fixture(params=[(shape, layout) for shape in (RecurrentShape, HybridShape) for layout in LAYOUTS], ids=str)
def recurrent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    shape, layout = request.param
    yield from bed_of(shape, layout, tmp_path / "m.gguf")


def test_recurrent_state_is_cut_back_to_a_checkpoint_in_slots_copies_and_ram(recurrent: Bed) -> None:
    backend, expected = recurrent.backend, recurrent.anew(FORK, SHARED)
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


def test_recurrent_state_is_not_cut_back_without_a_checkpoint(recurrent: Bed) -> None:
    recurrent.compute(0, 0, LONG)
    assert recurrent.backend.first_cut(0) == recurrent.backend.first_saved_cut(len(LONG)) == len(LONG)
    assert not recurrent.backend.copy(0, 1, SHARED)
    assert not recurrent.backend.trim(0, SHARED)
    assert recurrent.backend.first_cut(0) == recurrent.backend.first_cut(1) == 0

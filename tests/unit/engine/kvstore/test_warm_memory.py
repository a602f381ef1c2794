"""Memory for the next states: as much as is expected waits, and what is taken has the size that was asked for."""

from __future__ import annotations

import sys

import pytest

from cellama.engine.kvstore.warm_memory import MAX_PIECES, STEP_BYTES, WarmMemory

MB = 1 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is too much could not be given back")


def warm(max_bytes: int, piece_bytes: int) -> WarmMemory:
    """All pieces are there."""
    memory = WarmMemory(max_bytes)
    memory.expect(piece_bytes)
    while memory.is_lacking:
        memory.add_piece(lambda: False)
    return memory


@pytest.mark.parametrize(
    ("max_bytes", "piece_bytes", "num_bytes"),
    [(7 * MB, 3 * MB, 6 * MB), (8 * MB, 1000, MAX_PIECES * 1000), (7 * MB, 100 * MB, 0), (0, MB, 0)],
)
def test_pieces_are_as_large_as_the_largest_state_and_as_many_as_fit(
    max_bytes: int, piece_bytes: int, num_bytes: int
) -> None:
    assert warm(max_bytes, piece_bytes).num_bytes == num_bytes


def test_larger_state_replaces_the_pieces() -> None:
    memory = warm(7 * MB, 3 * MB)
    memory.expect(5 * MB)
    assert memory.num_bytes == 0
    assert memory.is_lacking


@pytest.mark.parametrize(
    ("size", "left"), [(MB, 4 * MB), (3 * MB + 1, 4 * MB), (4 * MB, 4 * MB), (9 * MB, 8 * MB), (9, 8 * MB)]
)
def test_state_gets_memory_of_its_size_and_a_piece_if_that_fits_well(size: int, left: int) -> None:
    memory = warm(8 * MB, 4 * MB)
    taken = memory.take(size)
    assert (len(taken), memory.num_bytes) == (size, left)
    taken[size - 1] = taken[0] = 7


def test_piece_that_was_stopped_is_continued() -> None:
    memory = WarmMemory(8 * MB)
    memory.expect(4 * MB)
    memory.add_piece(iter([False, True]).__next__)
    assert memory.num_bytes == STEP_BYTES
    memory.add_piece(lambda: False)
    assert memory.num_bytes == 4 * MB

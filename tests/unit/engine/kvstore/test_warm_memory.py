"""Tests of prepared memory: number and size of the buffers, and the size of the returned memory."""

from __future__ import annotations

import sys

import pytest

from cellama.engine.kvstore.reader import MAX_BUFFERS, TOUCH_BYTES, WarmMemory

MB = 1 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="surplus memory is only returned on Linux")


def warm(max_bytes: int, piece_bytes: int) -> WarmMemory:
    """Return a WarmMemory with all of its buffers."""
    memory = WarmMemory(max_bytes)
    memory.expect(piece_bytes)
    while memory.needs_buffer:
        memory.add_buffer(lambda: False)
    return memory


@pytest.mark.parametrize(
    ("max_bytes", "piece_bytes", "num_bytes"),
    [(7 * MB, 3 * MB, 6 * MB), (8 * MB, 1000, MAX_BUFFERS * 1000), (7 * MB, 100 * MB, 0), (0, MB, 0)],
)
def test_buffers_have_the_size_of_the_largest_state_within_the_limits(
    max_bytes: int, piece_bytes: int, num_bytes: int
) -> None:
    assert warm(max_bytes, piece_bytes).num_bytes == num_bytes


def test_buffers_are_dropped_when_a_larger_state_is_expected() -> None:
    memory = warm(7 * MB, 3 * MB)
    memory.expect(5 * MB)
    assert memory.num_bytes == 0
    assert memory.needs_buffer


@pytest.mark.parametrize(
    ("size", "left"), [(MB, 4 * MB), (3 * MB + 1, 4 * MB), (4 * MB, 4 * MB), (9 * MB, 8 * MB), (9, 8 * MB)]
)
def test_take_returns_memory_of_the_requested_size_from_a_suitable_buffer(size: int, left: int) -> None:
    memory = warm(8 * MB, 4 * MB)
    taken = memory.take(size)
    assert (len(taken), memory.num_bytes) == (size, left)
    taken[size - 1] = taken[0] = 7


def test_add_buffer_continues_to_fill_an_unfinished_buffer() -> None:
    memory = WarmMemory(8 * MB)
    memory.expect(4 * MB)
    memory.add_buffer(iter([False, True]).__next__)
    assert memory.num_bytes == TOUCH_BYTES
    memory.add_buffer(lambda: False)
    assert memory.num_bytes == 4 * MB

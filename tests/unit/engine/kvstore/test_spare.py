"""Memory for the next state: as much as is expected waits, and what is taken is as long as it was asked for."""

from __future__ import annotations

import sys

import pytest

from cellama.engine.kvstore.spare import MOST_PIECES, STEP_BYTES, Spare

MB = 1 << 20


def filled(spare: Spare) -> int:
    while spare.touch_more():
        pass
    return spare.num_bytes


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is too much could not be given back")


def test_pieces_are_as_large_as_the_largest_state_and_as_many_as_fit() -> None:
    spare = Spare(7 * MB)
    assert filled(spare) == 0
    spare.expect(3 * MB)
    assert spare.touch_more()
    assert spare.num_bytes == STEP_BYTES
    assert filled(spare) == 6 * MB
    spare.expect(100 * MB)  # too large for any
    assert filled(spare) == 6 * MB
    spare.expect(5 * MB)
    assert (spare.num_bytes, filled(spare)) == (0, 5 * MB)


def test_many_small_states_have_few_pieces() -> None:
    spare = Spare(8 * MB)
    spare.expect(1000)
    assert filled(spare) == MOST_PIECES * 1000


@pytest.mark.parametrize("size", [MB, 3 * MB + 1, 4 * MB])
def test_state_gets_a_piece_of_its_own_length(size: int) -> None:
    spare = Spare(8 * MB)
    spare.expect(4 * MB)
    filled(spare)
    taken = spare.take(size)
    assert (len(taken), spare.num_bytes) == (size, 4 * MB)
    taken[size - 1] = taken[0] = 7


def test_state_larger_than_all_of_it_leaves_it_to_others() -> None:
    spare = Spare(8 * MB)
    spare.expect(4 * MB)
    filled(spare)
    assert len(spare.take(8 * MB + 1)) == 8 * MB + 1
    assert spare.num_bytes == 8 * MB


def test_pieces_shrink_where_states_are_smaller() -> None:
    spare = Spare(8 * MB)
    spare.expect(8 * MB)
    for _ in range(40):
        filled(spare)
        assert len(spare.take(1000)) == 1000
    assert filled(spare) < 4 * MOST_PIECES * 1000 + MB


def test_without_a_limit_there_is_none() -> None:
    spare = Spare(0)
    spare.expect(MB)
    assert (filled(spare), len(spare.take(MB))) == (0, MB)

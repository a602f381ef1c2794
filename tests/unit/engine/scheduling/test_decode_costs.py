"""The costs of passes are learned on any machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from cellama.engine.backend import Chunk
from cellama.engine.scheduling.decode_costs import TRUSTED, DecodeCosts, MoveCosts
from cellama.engine.scheduling.slot_layout import pass_rows_of, runs_of

CPU = {1: 6.9, 2: 17.2, 8: 25.8, 16: 28.7, 32: 57.8, 64: 99.9}  # milliseconds by rows of a 174M model on two cores


def cpu(size: int) -> float:
    low, high = max(s for s in CPU if s <= size), min(s for s in CPU if s >= size)
    return CPU[low] if low == high else CPU[low] + (CPU[high] - CPU[low]) * (size - low) / (high - low)


def gpu(size: int) -> float:
    return 8.0 + 0.01 * size


@pytest.mark.parametrize("machine", [cpu, gpu])
def test_costs_are_learned_from_sums_of_passes_despite_noise(machine: Callable[[int], float]) -> None:
    rng, costs = random.Random(1), DecodeCosts()
    for step in range(400):
        sizes = [run.size for run in runs_of(sorted(rng.sample(range(64), rng.choice([1, 2, 8, 40, 60, 64]))))]
        sizes = sizes if step % 2 else [sum(sizes)]
        busy = 8.0 if step % 50 == 49 else 1.0  # another process uses the machine
        costs.observe(sizes, busy * sum(map(machine, sizes)) * rng.uniform(0.9, 1.1))
    for size in (1, 2, 8, 40, 64):
        assert costs.expected(size) == pytest.approx(machine(size), rel=0.35)


def test_one_measurement_scales_the_costs_of_all_sizes() -> None:
    costs = DecodeCosts()
    before = costs.expected(1) / costs.expected(16)
    costs.observe([8], 0.024)
    assert costs.expected(8) == pytest.approx(0.024)
    assert costs.expected(1) / costs.expected(16) == pytest.approx(before)


def test_passes_with_many_rows_do_not_change_the_cost_of_one_row() -> None:
    costs = DecodeCosts()
    for _ in range(8):
        costs.observe([1], 0.007)
    for _ in range(500):
        costs.observe([16], 0.029)
    assert costs.expected(1) == pytest.approx(0.007)
    assert costs.optimistic(1) < 0.007  # because it was measured long ago
    assert costs.optimistic(16) == pytest.approx(0.029)


def test_cost_of_a_size_is_known_after_several_measurements() -> None:
    costs = DecodeCosts()
    for _ in range(TRUSTED):
        assert not costs.is_known(5)
        costs.observe([5], 0.02)
    assert costs.is_known(5)
    assert not any(costs.is_known(rows) for rows in (4, 8))


@given(st.lists(st.tuples(st.lists(st.integers(1, 20), min_size=1), st.floats(0, 1e4)), max_size=30))
def test_cost_table_is_positive_and_never_decreases_with_more_rows(measured: list[tuple[list[int], float]]) -> None:
    costs = DecodeCosts()
    for sizes, seconds in measured:
        costs.observe(sizes, seconds)
    table = costs.table(20)
    assert len(table) == 21
    assert all(costs.optimistic(size) <= costs.expected(size) for size in range(1, 21))
    assert table[0] == 0
    assert all(0 < before <= after < float("inf") for before, after in pairwise(table[1:]))


@pytest.mark.parametrize(("unified", "expected"), [(False, [2, 1, 6]), (True, [9])])
def test_pass_consists_of_adjacent_slots_with_the_same_number_of_tokens(unified: bool, expected: list[int]) -> None:
    chunks = [Chunk(slot, 0, [7] * count, True) for slot, count in [(0, 1), (1, 1), (2, 3), (3, 3), (5, 1)]]
    assert pass_rows_of(chunks, unified=unified) == expected


def test_move_costs_follow_recent_moves() -> None:
    costs = MoveCosts()
    for _ in range(40):
        costs.observe(436, 0.005)
    assert costs.of(436) == pytest.approx(0.005, rel=0.01)
    assert costs.of(936) == pytest.approx(0.010, rel=0.01)
    assert costs.of(0) == 0

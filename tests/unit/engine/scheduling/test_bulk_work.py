"""Bulk work while streams decode: the number of rows, their choice, and when prompts are prefilled."""

from __future__ import annotations

from collections import Counter

import pytest

from cellama.engine.scheduling.strategies import (
    FAR_EVERY,
    FAR_STRETCH,
    FLUENT_S,
    MAX_OWED_S,
    MAX_SAVED_S,
    PREFILL_S,
    PREFILL_SHARE,
    STRETCH,
    BulkPrefill,
    BulkRows,
    TimeBudget,
)


def settled(row_s: float, alone_s: float) -> list[int]:
    """Return the rows of each of the last 100 steps, if a step takes `alone_s` and `row_s` more for each row."""
    rows, counts = BulkRows(), []
    for _ in range(300):
        counts.append(len(rows.take(range(64))))
        rows.observe(alone_s + row_s * counts[-1])
    return counts[-100:]


@pytest.mark.parametrize("row_s", [0.001, 0.002, 0.004])
def test_bulk_rows_fill_each_step_up_to_the_time_limit_for_fluent_streams(row_s: float) -> None:
    counts = settled(row_s, 0.01)
    most, most_far = (FLUENT_S - 0.01) / row_s, (FAR_STRETCH * FLUENT_S - 0.01) / row_s
    assert 0.7 * most <= sum(counts) / len(counts) <= 1.1 * most_far


def test_all_bulk_rows_are_decoded_when_rows_cost_little() -> None:
    assert settled(0.0001, 0.02)[-1] == 64


def test_steps_of_a_slow_model_become_slightly_longer() -> None:
    counts = settled(0.01, 0.2)
    assert 0.2 * 1.1 <= 0.2 + 0.01 * sum(counts) / len(counts) <= 0.2 * STRETCH * FAR_STRETCH


def test_each_bulk_row_gets_turns_and_rows_next_to_streams_get_the_most() -> None:
    rows, seen = BulkRows(), Counter[int]()
    for _ in range(FAR_EVERY * 64):
        taken = rows.take(range(3, 64), [0, 1, 2])
        seen.update(taken)
        rows.observe(2 * FLUENT_S if len(taken) > 5 else FLUENT_S / 2)
    assert set(seen) == set(range(3, 64))
    assert min(seen[slot] for slot in (3, 4)) > 10 * max(seen[slot] for slot in range(12, 64))
    others = [seen[slot] for slot in range(12, 64)]
    assert max(others) - min(others) <= 1


def test_bulk_rows_between_streams_are_decoded_first() -> None:
    assert sorted(BulkRows().take([3, 11, 20, 21, *range(40, 60)], [2, 4, 10, 12]))[:3] == [3, 11, 20]


def test_bulk_prefill_gets_its_share_of_the_time() -> None:
    prefill, prefill_s, all_s = BulkPrefill(), 0.0, 0.0
    for _ in range(1000):
        is_due = prefill.is_due
        prefill_s, all_s = prefill_s + 0.2 * is_due, all_s + (0.2 if is_due else 0.04)
        prefill.observe(PREFILL_S + 0.2 if is_due else 0.04, has_bulk=is_due)
    assert 0.9 * PREFILL_SHARE <= prefill_s / all_s <= 1.1 * PREFILL_SHARE


def test_bulk_prefill_is_always_due_when_it_is_fast() -> None:
    prefill = BulkPrefill()
    for _ in range(100):
        prefill.observe(PREFILL_S, has_bulk=True)
        assert prefill.is_due


def test_bulk_prefill_is_due_again_soon_after_a_very_long_step() -> None:
    prefill = BulkPrefill()
    prefill.observe(60.0, has_bulk=True)
    assert not prefill.is_due
    prefill.observe(MAX_OWED_S)
    assert prefill.is_due


def test_time_budget_is_a_share_of_the_elapsed_time_and_accumulates() -> None:
    budget, spent_s, all_s = TimeBudget(0.02), 0.0, 0.0
    while all_s < 100.0:
        budget.observe(0.1)
        all_s += 0.1
        if budget.is_available:
            budget.spend(0.05)
            spent_s += 0.05
    assert 0.02 * 100.0 <= spent_s <= 0.02 * 100.0 + MAX_SAVED_S + 0.05

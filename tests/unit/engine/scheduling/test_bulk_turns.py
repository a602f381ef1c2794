"""Bulk work beside streams: how many rows, which ones, and when prompts are read."""

from __future__ import annotations

from collections import Counter

from cellama.engine.scheduling.bulk_turns import (
    FAR_EVERY,
    FAR_STRETCH,
    FLUENT_S,
    MOST_GIVEN_S,
    MOST_OWED_S,
    READ_S,
    READ_SHARE,
    STILL_SHARE,
    STRETCH,
    BulkTurns,
    Courtesy,
)


def settled(turns: BulkTurns, bulk: range, row_s: float, alone_s: float, steps: int = 300) -> list[int]:
    """Rows of each step, where one takes so long alone and so much longer with each row."""
    counts = []
    for _ in range(steps):
        counts.append(len(turns.rows(bulk)))
        turns.observe_decode(alone_s + row_s * counts[-1])
    return counts


def test_bulk_turns_take_as_many_rows_as_a_fluent_step_has_time_for() -> None:
    for row_s in (0.001, 0.002, 0.004):
        last = settled(BulkTurns(), range(64), row_s, 0.01)[-100:]
        most, most_far = (FLUENT_S - 0.01) / row_s, (FAR_STRETCH * FLUENT_S - 0.01) / row_s
        assert 0.7 * most <= sum(last) / len(last) <= 1.1 * most_far


def test_bulk_turns_take_all_rows_where_they_cost_little() -> None:
    assert settled(BulkTurns(), range(64), 0.0001, 0.02)[-1] == 64


def test_bulk_turns_stretch_steps_of_a_slow_model_a_little() -> None:
    last = settled(BulkTurns(), range(64), 0.01, 0.2)[-100:]
    assert 0.2 * 1.1 <= 0.2 + 0.01 * sum(last) / len(last) <= 0.2 * STRETCH * FAR_STRETCH


def test_bulk_turns_come_round_to_every_row_but_oftenest_to_those_beside_streams() -> None:
    turns, seen = BulkTurns(), Counter[int]()
    for _ in range(FAR_EVERY * 64):
        chosen = turns.rows(range(3, 64), [0, 1, 2])
        seen.update(chosen)
        turns.observe_decode(2 * FLUENT_S if len(chosen) > 5 else FLUENT_S / 2)
    assert set(seen) == set(range(3, 64))
    assert min(seen[slot] for slot in (3, 4)) > 10 * max(seen[slot] for slot in range(12, 64))
    others = [seen[slot] for slot in range(12, 64)]
    assert max(others) - min(others) <= 1


def test_bulk_turns_take_what_lies_between_streams_first() -> None:
    turns = BulkTurns()
    assert sorted(turns.rows([3, 11, 20, 21, *range(40, 60)], [2, 4, 10, 12]))[:3] == [3, 11, 20]


def test_bulk_turns_read_prompts_in_their_share_of_the_time() -> None:
    turns, read_s, all_s = BulkTurns(), 0.0, 0.0
    for _ in range(1000):
        seconds = READ_S + 0.2 if turns.may_read() else 0.04
        read_s, all_s = read_s + (0.2 if turns.may_read() else 0.0), all_s + min(seconds, 0.2)
        if turns.may_read():
            turns.observe_read(seconds, bulk=True)
        else:
            turns.observe_decode(seconds)
    assert 0.9 * READ_SHARE <= read_s / all_s <= 1.1 * READ_SHARE


def test_bulk_turns_read_prompts_at_any_time_where_that_is_quick() -> None:
    turns = BulkTurns()
    for _ in range(100):
        turns.observe_read(READ_S, bulk=True)
        assert turns.may_read()


def test_bulk_turns_owe_little_after_one_very_long_step() -> None:
    turns = BulkTurns()
    turns.observe_read(60.0, bulk=True)
    assert not turns.may_read()
    turns.observe_read(MOST_OWED_S, bulk=False)
    assert turns.may_read()


def test_courtesy_is_a_share_of_the_time_and_what_was_saved_up() -> None:
    courtesy, given_s, all_s = Courtesy(0.02), 0.0, 0.0
    while all_s < 100.0:
        courtesy.observe(0.1)
        all_s += 0.1
        if courtesy.is_left:
            courtesy.give(0.05)
            given_s += 0.05
    assert 0.02 * 100.0 <= given_s <= 0.02 * 100.0 + MOST_GIVEN_S + 0.05


def test_bulk_rows_stand_still_in_their_share_of_the_time() -> None:
    turns, num_still = BulkTurns(), 0
    for _ in range(10_000):
        turns.observe(0.1)
        if turns.may_stand_still:
            turns.observe_still(0.1)
            num_still += 1
    assert STILL_SHARE * 10_000 <= num_still <= STILL_SHARE * 10_000 + MOST_GIVEN_S / 0.1 + 1

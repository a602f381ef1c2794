"""Filling holes between slots, and moving sequences."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given, settings, strategies as st

from cellama.engine.scheduling.slot_layout import adjacent_slot, cheapest_cover, compacting_moves, runs_of

SLOTS = st.sets(st.integers(0, 15), min_size=1).map(sorted)
# Seconds for passes of 0 to 16 rows, which never decrease.
COSTS = st.lists(st.integers(0, 20), min_size=16, max_size=16).map(lambda steps: [0, *(5 + s for s in sorted(steps))])


def seconds(slots: list[int], cost: list[int]) -> int:
    return sum(cost[run.size] for run in runs_of(slots))


@given(SLOTS)
def test_runs_of_returns_the_smallest_number_of_runs(slots: list[int]) -> None:
    runs = runs_of(slots)
    assert [slot for run in runs for slot in range(run.first, run.end)] == slots
    assert all(before.end < after.first for before, after in pairwise(runs))


@settings(deadline=None)
@given(st.sets(st.integers(0, 9), min_size=1).map(sorted), st.sets(st.integers(0, 9)), COSTS)
def test_cover_is_the_cheapest_possible_and_fills_only_allowed_holes(
    slots: list[int], fillable: set[int], cost: list[int]
) -> None:
    cover = cheapest_cover(slots, fillable.__contains__, cost)
    between = [slot for slot in range(slots[0], slots[-1]) if slot not in slots and slot in fillable]
    assert set(cover.holes) <= set(between)
    ways = [holes for size in range(len(between) + 1) for holes in combinations(between, size)]
    assert cover.seconds == min(seconds(sorted([*slots, *holes]), cost) for holes in ways)
    assert cover.seconds == seconds(sorted([*slots, *cover.holes]), cost)
    assert cover == cheapest_cover(slots, fillable.__contains__, cost)


@given(SLOTS, st.sets(st.integers(0, 15)), st.lists(st.integers(0, 500), min_size=16, max_size=16))
def test_moves_use_idle_slots_and_do_not_increase_the_number_of_runs(
    own: list[int], idle: set[int], weight: list[int]
) -> None:
    idle -= set(own)
    moves = compacting_moves(own, sorted(idle), dict(enumerate(weight)))
    leaving, targets = [move[0] for move in moves], [move[1] for move in moves]
    assert set(leaving) <= set(own)
    assert set(targets) <= idle
    assert len(set(leaving)) == len(set(targets)) == len(moves)
    after = sorted({*own} - {*leaving} | {*targets})
    assert len(runs_of(after)) <= len(runs_of(own))
    assert compacting_moves(after, sorted(({*own} | idle) - {*after}), dict.fromkeys(range(16), 1)) == []


def test_moves_do_not_affect_heavy_slots() -> None:
    weight = {0: 10, 1: 0, 2: 0, 3: 900, 4: 0}
    assert compacting_moves([0, 3], [1, 2, 4], weight) == [(0, 2)]
    assert compacting_moves([0, 3], [1, 2, 4], weight | {2: 50}) == [(0, 4)]
    assert compacting_moves([0, 3], [1, 2, 4], weight | {0: 2000}) == [(3, 1)]


def test_new_sequence_gets_a_hole_or_a_slot_next_to_running_sequences() -> None:
    assert adjacent_slot([0, 1, 3, 4], [2, 5]) == 2
    assert adjacent_slot([4, 5], [0, 1, 6, 7]) == 6
    assert adjacent_slot([4, 5], [0, 3]) == 3
    assert adjacent_slot([], [2, 3]) == 2
    assert adjacent_slot([0], []) is None

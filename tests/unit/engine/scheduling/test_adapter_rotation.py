"""Groups with different adapters take turns. None starves, a turn lasts a while, and a group's slots stay together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from cellama.engine.scheduling.scheduler import BULK_EXTRA_S, BULK_SLICE_S, SLICE_S, AdapterRotation

GROUPS = "abcdef"
MAX_STEP_S = 0.4
Arrival = tuple[int, str, bool, int]  # step, group, interactive, steps until it leaves


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(GROUPS), st.booleans(), st.integers(1, 80))),
    steps=st.lists(st.floats(0.001, MAX_STEP_S), min_size=120, max_size=120),
)
def test_rotation_serves_every_group_within_a_limited_time(arrivals: list[Arrival], steps: list[float]) -> None:
    rotation, now = AdapterRotation(), 0.0
    running: list[tuple[str, bool, int]] = []
    served: dict[str, float] = {}
    for step, seconds in enumerate(steps):
        for _, key, interactive, length in (arrival for arrival in arrivals if arrival[0] == step):
            rotation.add(key, interactive, now)
            running.append((key, interactive, step + length))
            served.setdefault(key, now)
        for key, interactive, end in [entry for entry in running if entry[2] == step]:
            rotation.remove(key, interactive)
            running.remove((key, interactive, end))
        present = {key for key, _, _ in running}
        served = {key: at for key, at in served.items() if key in present}
        assert rotation.is_needed == (len(present) > 1)
        turn = rotation.take_turn(now) if rotation.is_needed else next(iter(present), None)
        if turn is not None:
            assert turn in present
            served[str(turn)] = now
        # A group waits for the current turn, and for one turn of each other group that has waited longer.
        longest = BULK_EXTRA_S + (len(GROUPS) + 1) * (BULK_SLICE_S + MAX_STEP_S)
        assert all(now - at <= longest for at in served.values())
        now += seconds


def turns(rotation: AdapterRotation, seconds: float, step_s: float = 0.01) -> list[str]:
    """Return the group of each step."""
    return [str(rotation.take_turn(step * step_s)) for step in range(round(seconds / step_s))]


def test_turn_lasts_for_one_time_slice_and_groups_share_the_time() -> None:
    rotation = AdapterRotation()
    for key in "abc":
        rotation.add(key, interactive=True, now=0.0)
    served = turns(rotation, 30.0)
    switches = sum(a != b for a, b in itertools.pairwise(served))
    assert all(served.count(key) == pytest.approx(1000, rel=0.1) for key in "abc")
    assert switches <= 30.0 / SLICE_S


def test_turns_are_longer_while_only_bulk_requests_have_slots() -> None:
    rotation = AdapterRotation()
    for key in "ab":
        rotation.add(key, interactive=False, now=0.0)
    served = turns(rotation, 30.0)
    assert sum(a != b for a, b in itertools.pairwise(served)) <= 30.0 / BULK_SLICE_S


def test_new_group_goes_next_and_interactive_groups_get_more_turns_than_bulk_groups() -> None:
    rotation = AdapterRotation()
    rotation.add("bulk", interactive=False, now=0.0)
    rotation.add("chat", interactive=True, now=5.0)
    assert rotation.take_turn(5.0) == "chat"
    served = [rotation.take_turn(5.0 + step * 0.01) for step in range(1000)]
    assert 0.1 < served.count("bulk") / len(served) < 0.4
    assert "bulk bulk" in " ".join(map(str, served))
    longest = max(map(len, "".join("b" if s == "bulk" else " " for s in served).split()))
    assert longest * 0.01 <= SLICE_S + 0.011  # the longest wait of an interactive request with steps of 10 ms


def test_single_group_yields_to_a_new_group_and_turns_change_while_the_clock_is_stopped() -> None:
    rotation = AdapterRotation()
    rotation.add("a", interactive=True, now=0.0)
    assert not rotation.is_needed
    rotation.add("b", interactive=True, now=0.0)
    assert rotation.take_turn(0.0) == "b"
    rotation.remove("b", interactive=True)
    assert not rotation.is_needed
    assert rotation.take_turn(0.0) == "a"

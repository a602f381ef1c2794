"""Tests of the seconds that a state on disk saves."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from cellama.engine.kvstore.benefit import RunningRate, saved_s

RATES = st.floats(1, 1e6)


@given(st.integers(0, 10**6), st.integers(0, 10**12), RATES, RATES)
def test_state_file_saves_time_only_if_reading_it_is_faster_than_computing_the_state(
    num_tokens: int, num_bytes: int, prefill: float, read: float
) -> None:
    gain_s = saved_s(num_tokens, num_bytes, prefill, read)
    assert gain_s < num_tokens / prefill
    assert gain_s <= 0 or num_bytes / read < num_tokens / prefill


def test_time_saved_is_positive_only_for_long_prompts_on_slow_processors() -> None:
    assert saved_s(2000, 2000 * 128 << 10, 100, 1e9) > 0
    assert saved_s(64, 64 * 128 << 10, 10_000, 1e8) <= 0


def test_running_rate_starts_at_an_estimate_and_follows_recent_measurements() -> None:
    rate = RunningRate(initial_per_s=100, initial_units=10, memory_units=1000)
    assert rate.per_s == 100
    for _ in range(10):
        rate.add(1000, 100.0)
    assert rate.per_s == pytest.approx(10, rel=0.01)
    for _ in range(10):
        rate.add(1000, 1.0)
    assert rate.per_s == pytest.approx(1000, rel=0.1)

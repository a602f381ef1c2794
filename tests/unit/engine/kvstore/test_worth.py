"""What a state on disk is worth: only what is read faster than it is computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cellama.engine.kvstore.worth import longest_wait_s, read_s, saved_s, worth_s

RATES = st.floats(1, 1e6)


@given(st.integers(0, 10**6), st.integers(0, 10**12), RATES, RATES, st.floats(0, 1))
def test_worth_is_never_below_zero_and_positive_only_for_what_is_worth_reading(
    num_tokens: int, num_bytes: int, prefill: float, read: float, probability: float
) -> None:
    worth = worth_s(num_tokens, num_bytes, prefill, read, probability)
    assert 0 <= worth <= longest_wait_s(num_tokens, prefill)
    if worth:
        assert saved_s(num_tokens, num_bytes, prefill, read) > 0
        assert read_s(num_bytes, read) < longest_wait_s(num_tokens, prefill)


def test_worth_of_a_long_prompt_on_a_slow_processor_and_of_a_short_one_on_a_fast_one() -> None:
    assert saved_s(2000, 2000 * 128 << 10, 100, 1e9) > 0
    assert saved_s(64, 64 * 128 << 10, 10_000, 1e8) <= 0


def test_nothing_is_read_while_the_rate_of_computing_is_not_known() -> None:
    assert saved_s(2000, 1, 0.0, 1e9) <= 0
    assert longest_wait_s(2000, 0.0) == 0

"""Test the estimates of the tokens that a request may use."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from cellama.api.http.parsing import MIN_TOKENS, rest_of_context, tokens_of, within_limit
from cellama.config import limits

MODEL: Any = {"id": "tiny", "ctx_per_slot": 1000}


def test_max_tokens_defaults_to_context_or_limit_of_logprobs() -> None:
    unknown: Any = {"id": "tiny"}
    assert rest_of_context(MODEL, {}) == 1000
    assert rest_of_context(unknown, {}) == MIN_TOKENS
    long: Any = {**MODEL, "ctx_per_slot": 10**9}
    assert rest_of_context(long, {"logprobs": 4, "n": 2}) == limits.MAX_REPORTED // 10
    assert rest_of_context(long, {"logprobs": "many", "n": 0}) == limits.MAX_REPORTED


def test_default_max_tokens_of_all_answers_is_a_quarter_of_the_limit() -> None:
    assert within_limit(None, 1000) == 1000
    assert within_limit(400, 1000) == 100
    assert within_limit(400, 1000, 5) == 20
    assert within_limit(400, 10, 5) == 10
    assert within_limit(3, 1000, 5) == 1


def test_tokens_of_nested_contents_are_estimated() -> None:
    assert tokens_of("ab", "cdef", "gh") == 2
    assert tokens_of([1, 2, 3], [[4, 5], [6]]) == 8
    assert 25 <= tokens_of([{"role": "user", "content": "x" * 100}]) <= 35
    assert tokens_of(None, 1.5, {}, []) == 2


@pytest.mark.parametrize("content", [[1] * 1_000_000, "x" * 10_000_000])
def test_estimating_tokens_copies_no_contents(content: Any) -> None:
    tracemalloc.start()
    try:
        assert tokens_of(content) > 20_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()

"""How many tokens a request may take before it is known how many it takes: api/http/allowance.py."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from cellama.api.http.parsing import MIN_TOKENS, rest_of_context, tokens_of, within_limit
from cellama.config import limits

MODEL: Any = {"id": "tiny", "ctx_per_slot": 1000}


def test_answer_that_does_not_say_has_the_context_or_what_logprobs_allow() -> None:
    unknown: Any = {"id": "tiny"}
    assert rest_of_context(MODEL, {}) == 1000
    assert rest_of_context(unknown, {}) == MIN_TOKENS
    long: Any = {**MODEL, "ctx_per_slot": 10**9}
    assert rest_of_context(long, {"logprobs": 4, "n": 2}) == limits.MAX_REPORTED // 10
    assert rest_of_context(long, {"logprobs": "many", "n": 0}) == limits.MAX_REPORTED


def test_answers_of_a_request_have_a_quarter_of_a_limit_together() -> None:
    assert within_limit(None, 1000) == 1000
    assert within_limit(400, 1000) == 100
    assert within_limit(400, 1000, 5) == 20
    assert within_limit(400, 10, 5) == 10
    assert within_limit(3, 1000, 5) == 1


def test_tokens_of_contents_are_estimated_together() -> None:
    assert tokens_of("ab", "cdef", "gh") == 2
    assert tokens_of([1, 2, 3], [[4, 5], [6]]) == 8
    assert 25 <= tokens_of([{"role": "user", "content": "x" * 100}]) <= 35
    assert tokens_of(None, 1.5, {}, []) == 2


@pytest.mark.parametrize("content", [[1] * 1_000_000, "x" * 10_000_000])
def test_contents_are_not_copied_to_estimate_their_tokens(content: Any) -> None:
    tracemalloc.start()
    try:
        assert tokens_of(content) > 20_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()

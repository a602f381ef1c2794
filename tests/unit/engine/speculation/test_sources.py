"""Drafts from texts, compared with a search of the whole text."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings, strategies as st

from cellama.engine.speculation.sources import (
    ALL_POOLS_TOKENS,
    BREAK,
    MAX_POOLS,
    POOL_TOKENS,
    RUNS,
    AcceptanceRates,
    DraftTokens,
    Follower,
    Index,
    Pool,
    Pools,
)

from ....conftest import EXAMPLES


def found(text: list[int], most: int = 4) -> list[int] | None:
    draft = Follower("prompt", Index(text), text).draft(most)
    return None if draft is None else draft.tokens


@settings(max_examples=60 * EXAMPLES, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60))
def test_draft_is_the_last_continuation_of_the_longest_matching_run(text: list[int]) -> None:
    expected = None
    for length in RUNS:
        tail = text[len(text) - length :]
        places = [at for at in range(length, len(text)) if text[at - length : at] == tail] if len(text) > length else []
        if places and expected is None:
            following = text[places[-1] : places[-1] + 4]
            expected = [following[i % len(following)] for i in range(4)]
    assert found(text) == expected


@settings(max_examples=40 * EXAMPLES, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.integers(1, 79))
def test_following_a_growing_text_finds_all_matches(text: list[int], begin: int) -> None:
    growing = text[:begin]
    follower = Follower("prompt", Index(growing), growing)
    for token in text[begin:]:
        draft = follower.draft(3)
        if draft is not None:
            assert len(draft.tokens) == len(draft.buckets) == 3
            assert any(growing[at] == draft.tokens[0] for at in range(len(growing)))
        growing.append(token)


def test_confidence_grows_while_a_text_is_followed_and_is_lost_when_it_diverges() -> None:
    random = Random(1)
    text = [random.randrange(1000) for _ in range(100)]
    growing = [*text, *text[:3]]
    follower = Follower("prompt", Index(growing), growing)
    marks = []
    for token in text[3:60]:
        draft = follower.draft(1)
        assert draft is not None
        assert draft.tokens == [token]
        marks += draft.buckets
        growing.append(token)
    assert marks == sorted(marks)
    assert marks[0] < marks[-1]
    growing.append(-5)
    assert follower.draft(1) is None


def test_long_prompt_is_indexed_completely_in_several_parts() -> None:
    text = [*range(5000), 4990, 4991, 4992]
    follower = Follower("prompt", Index(text), text)
    drafts = [follower.draft(2) for _ in range(6)]
    assert drafts[0] is None
    assert drafts[-1] is not None
    assert drafts[-1].tokens == [4993, 4994]


def test_pool_has_a_size_limit_and_drops_the_oldest_texts() -> None:
    pool = Pool()
    for number in range(40):
        pool.add([number * 1000 + i for i in range(1000)])
    assert len(pool.index.tokens) <= POOL_TOKENS
    for number, is_known in ((39, True), (0, False)):
        text = [number * 1000 + i for i in range(3)]
        pool.index.read(POOL_TOKENS)
        assert (pool.index.find(text) is not None) == is_known


def test_draft_from_a_pool_ends_with_its_text() -> None:
    pool = Pool()
    pool.add([1, 2, 3, 4, 5])
    pool.add([6, 7, 8])
    text = [9, 1, 2, 3]
    draft = Follower("pool", pool.index, text).draft(8)
    assert draft is not None
    assert draft.tokens == [4, 5]
    assert BREAK not in draft.tokens


def test_scopes_have_separate_pools_with_a_common_size_limit() -> None:
    pools = Pools()
    for scope in range(20):
        pools.of(scope).add([scope * 10000 + i for i in range(8000)])
    assert pools.num_tokens <= ALL_POOLS_TOKENS + 8001
    assert pools.of("new").index.find([190000, 190001, 190002]) is None


def test_number_of_pools_is_limited_when_scopes_have_little_text() -> None:
    pools = Pools()
    for scope in range(2 * MAX_POOLS):
        pools.of(scope).add([1])
    assert pools.num_tokens == 2 * MAX_POOLS  # each has one token and a break
    assert pools.of(2 * MAX_POOLS - 1).index.tokens
    assert not pools.of(0).index.tokens


def test_acceptance_rates_follow_observations_and_may_differ_between_sequences() -> None:
    general = AcceptanceRates()
    lucky, unlucky = AcceptanceRates(general), AcceptanceRates(general)
    for _ in range(100):
        lucky.observe(DraftTokens("pool", [1, 2], [0, 1]), [1, 2, 3])
        unlucky.observe(DraftTokens("pool", [1, 2], [0, 1]), [7])
    assert lucky.of("pool", 0) > 0.9 > 0.5 > general.of("pool", 0) * 0.9 > unlucky.of("pool", 0)
    assert unlucky.of("pool", 1) > 0.9  # it was never reached
    assert abs(lucky.of("prompt", 0) - AcceptanceRates().of("prompt", 0)) < 1e-9

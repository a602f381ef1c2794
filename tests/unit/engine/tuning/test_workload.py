"""Tests of the workload that a tuning measurement runs."""

from __future__ import annotations

from collections import Counter
from statistics import mean

from cellama.engine.tuning.measure import MIN_REQUESTS, NUM_HEADS, RequestLengths, num_requests, requests

LENGTHS = RequestLengths(64, 32)


def test_half_of_the_requests_have_equal_lengths_and_the_other_half_has_a_similar_mean_length() -> None:
    asked = requests(LENGTHS, 400, 30_000)
    uniform, mixed = asked[::2], asked[1::2]
    assert {(len(prompt), new) for prompt, new in uniform} == {(64, 32)}
    prompts, new = [len(prompt) for prompt, _ in mixed], [new for _, new in mixed]
    assert 0.7 * 64 < mean(prompts) < 1.3 * 64
    assert 0.7 * 32 < mean(new) < 1.3 * 32
    assert len(set(prompts)) > 20
    assert min(new) < 16
    assert max(len(prompt) + new for prompt, new in asked) <= LENGTHS.max_tokens


def test_a_third_of_the_mixed_requests_share_a_few_prefixes() -> None:
    heads = Counter(prompt[:64] for prompt, _ in requests(LENGTHS, 180, 30_000) if len(prompt) >= 64)
    shared = {head: count for head, count in heads.items() if count > 1}
    assert list(shared.values()) == [10] * NUM_HEADS


def test_workload_is_reproducible_and_rounds_share_no_prefix() -> None:
    assert requests(LENGTHS, 20, 1000) == requests(LENGTHS, 20, 1000)
    one, other = ({prompt[:8] for prompt, _ in requests(LENGTHS, 20, 1000, round_)} for round_ in (1, 2))
    assert not one & other


def test_there_are_enough_requests_to_fill_every_slot_twice() -> None:
    assert [num_requests(slots) for slots in (1, 16, 64)] == [MIN_REQUESTS, 32, 128]


def test_smallest_workload_has_at_least_one_token_and_requires_only_a_small_vocabulary() -> None:
    asked = requests(RequestLengths(1, 1), 60, 8)
    assert min(min(len(prompt), new) for prompt, new in asked) == 1
    assert all(4 <= token < 8 for prompt, _ in asked for token in prompt)

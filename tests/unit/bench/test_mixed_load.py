"""The load of the benchmark `mixed`, whose requests have mixed lengths."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from cellama.bench.benchmarks.load.at_once import AtOnce
from cellama.bench.harness.mixed_load import (
    NEW_TOKENS,
    NUM_FAMILIES,
    PROMPT_TOKENS,
    SHARED_TOKENS,
    LoadShape,
    conversations,
    flat,
    sizes,
)
from cellama.bench.harness.workloads import Line, trie_optimum
from cellama.bench.peers.offline_peers import TimedFile


def test_load_has_mixed_lengths_within_its_bounds() -> None:
    lines = flat(conversations(LoadShape(160)))
    prompts, new = [len(line.prompt) for line in lines], [line.num_new for line in lines]
    assert len(lines) == 160 == len({line.custom_id for line in lines})
    assert PROMPT_TOKENS[0] <= min(prompts) < 40 < 400 < max(prompts) <= PROMPT_TOKENS[1]
    assert NEW_TOKENS[0] <= min(new) < 20 < 150 < max(new) <= NEW_TOKENS[1]


def test_a_third_of_the_load_shares_the_prefixes_of_five_families() -> None:
    lines = flat(conversations(LoadShape(160)))
    heads = Counter(line.prompt[:SHARED_TOKENS] for line in lines if len(line.prompt) > SHARED_TOKENS)
    shared = {head: count for head, count in heads.items() if count > 1}
    assert len(shared) == NUM_FAMILIES
    assert sum(shared.values()) == 54


def test_load_depends_on_its_seed() -> None:
    one, other = (flat(conversations(LoadShape(60), seed=seed)) for seed in (1, 2))
    assert one == flat(conversations(LoadShape(60), seed=1)) != other
    both = trie_optimum(line.prompt for line in one + other)
    apart = trie_optimum(line.prompt for line in one) + trie_optimum(line.prompt for line in other)
    assert apart - both < 60


def test_each_chat_turn_starts_with_the_previous_prompt() -> None:
    found = conversations(LoadShape(40, num_chats=5, turns=3))
    chats = [conversation for conversation in found if len(conversation) > 1]
    assert len(flat(found)) == 40
    assert [len(chat) for chat in chats] == [3] * 5
    for chat in chats:
        for before, after in itertools.pairwise(chat):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert len(after.prompt) > len(before.prompt) + before.num_new


def test_load_shrinks_with_its_scale() -> None:
    small, whole = (sizes(flat(conversations(LoadShape(90, scale=scale)))) for scale in (0.1, 1.0))
    assert 0.08 < small.prompt_tokens / whole.prompt_tokens < 0.13
    assert 0.08 < small.new_tokens / whole.new_tokens < 0.13


def test_load_rejects_chats_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="3 chats of 4 turns don't fit into 10 requests"):
        LoadShape(10, num_chats=3)


def test_sizes_count_each_prefix_once() -> None:
    found = sizes([Line("a", (1, 2, 3, 4), 2), Line("b", (1, 2, 5), 6)])
    assert (found.requests, found.prompt_tokens, found.trie_tokens, found.new_tokens) == (2, 7, 5, 8)
    assert found.longest == 9


def test_ratios_of_simultaneous_requests_are_relative_to_the_best_server() -> None:
    found = AtOnce(sizes(flat(conversations(LoadShape(20)))))
    times = {
        "engine alone": [11.0, 9.0, 10.0],
        "llama-server -np 16": [30.0],
        "llama-server -np 32": [15.0],
    }
    for who, seconds in times.items():
        for each in seconds:
            found.note(who, 16, TimedFile(20, each, found.load.trie_tokens))
    assert found.best_server == "llama-server -np 32"
    assert found.ratios() == pytest.approx({"at once: engine alone over the best llama-server": 1.5})
    assert found.requests_per_s("llama-server -np 32") == pytest.approx(20 / 15)

"""Tests that the catalog finds the same states as a comparison of every state token by token."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path

from hypothesis import given, strategies as st

from cellama.engine.kvstore.catalog import StateCatalog, longest_match
from cellama.engine.kvstore.keys import BLOCK, key_and_blocks, pack_tokens, seed_of
from cellama.engine.kvstore.states import StateHead, StateMatch, StatePart, StoreCounters, usable

SEEDS = [seed_of(b"model", (), scope) for scope in ("", "tenant")]
# Few different blocks, so that contexts share many of them, and tails of any length.
CONTEXTS = st.builds(
    lambda blocks, tail: array("I", [b for block in blocks for b in [block] * BLOCK] + [7] * tail),
    st.lists(st.integers(0, 1), min_size=0, max_size=5),
    st.integers(0, BLOCK - 1),
)
STATES = st.tuples(st.sampled_from(SEEDS), CONTEXTS, st.floats(0, 1), st.lists(st.floats(0, 1), max_size=3))


def head_of(
    seed: bytes, tokens: array[int], first_cut: int = 0, checkpoints: Mapping[int, int] | None = None
) -> StateHead:
    key, blocks = key_and_blocks(seed, pack_tokens(tokens))
    sizes = [(len(tokens), 9), *sorted((checkpoints or {}).items())]
    parts = tuple(StatePart(length, size, b"") for length, size in sizes)
    return StateHead(key, seed, tokens, first_cut, "", parts, blocks, 100 + len(tokens), 50)


def brute_force(heads: list[StateHead], seed: bytes, tokens: array[int]) -> tuple[int, int]:
    """Return the longest usable prefix of at least a block, and the size of the smallest file that has it."""
    best = (0, 0)
    for head in heads:
        if head.seed == seed:
            pairs = zip(head.tokens, tokens, strict=False)
            shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(head.tokens), len(tokens)))
            count = usable(shared, len(head.tokens), head.first_cut, head.checkpoints)
            if count >= BLOCK:
                best = max(best, (count, -head.num_bytes))
    return best[0], -best[1]


def find(heads: list[StateHead], tokens: array[int], seed: bytes = SEEDS[0]) -> StateMatch | None:
    return longest_match(heads, tokens, key_and_blocks(seed, pack_tokens(tokens))[1])


@given(st.lists(STATES, max_size=12), st.sampled_from(SEEDS), CONTEXTS)
def test_longest_match_equals_brute_force_search(
    states: list[tuple[bytes, array[int], float, list[float]]], seed: bytes, tokens: array[int]
) -> None:
    heads = []
    for state_seed, context, cut, lengths in states:
        if context:
            checkpoints = {max(1, int(length * len(context))): 5 for length in lengths}
            heads.append(head_of(state_seed, context, int(cut * len(context)), checkpoints))
    found = find(heads, tokens, seed)
    assert (found.num_usable if found else 0, found.head.num_bytes if found else 0) == brute_force(heads, seed, tokens)


def test_catalog_is_empty_after_all_states_are_removed(tmp_path: Path) -> None:
    catalog = StateCatalog(tmp_path, StoreCounters())
    heads = [head_of(SEEDS[0], array("I", range(length)), length // 2, {70: 4}) for length in (30, 200, 300)]
    for head in heads:
        catalog.add(head)
    for head in (*heads, heads[0]):
        catalog.remove(head.key)
    assert catalog.max_file_bytes == 0
    assert not catalog._groups


def test_longest_match_prefers_the_smallest_of_equally_long_states() -> None:
    found = find([head_of(SEEDS[0], array("I", range(n))) for n in (300, 1000, 260)], array("I", range(4 * BLOCK)))
    assert found is not None
    assert (found.num_usable, len(found.head.tokens)) == (256, 260)


def test_state_that_cannot_be_truncated_is_used_up_to_a_checkpoint() -> None:
    found = find([head_of(SEEDS[0], array("I", range(200)), 200, {100: 4, 150: 4})], array("I", [*range(140), 9, 9]))
    assert found is not None
    assert (found.num_shared, found.num_usable, found.usable(99)) == (140, 100, 0)

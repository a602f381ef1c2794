"""The index by blocks finds what looking at every state finds."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from cellama.engine.kvstore.index import StateIndex
from cellama.engine.kvstore.keys import BLOCK, key_and_blocks, pack_tokens, seed_of
from cellama.engine.kvstore.states import Head, Part, usable

SEEDS = [seed_of(b"model", (), scope) for scope in ("", "tenant")]
# Few different blocks, so that contexts share many; tails of any length.
CONTEXTS = st.builds(
    lambda blocks, tail: array("I", [b for block in blocks for b in [block] * BLOCK] + [7] * tail),
    st.lists(st.integers(0, 1), min_size=0, max_size=5),
    st.integers(0, BLOCK - 1),
)
STATES = st.tuples(st.sampled_from(SEEDS), CONTEXTS, st.floats(0, 1), st.lists(st.floats(0, 1), max_size=3))


def head_of(seed: bytes, tokens: array[int], first_cut: int = 0, checkpoints: Mapping[int, int] | None = None) -> Head:
    key, blocks = key_and_blocks(seed, pack_tokens(tokens))
    parts = tuple(Part(length, size, b"") for length, size in [(len(tokens), 9), *sorted((checkpoints or {}).items())])
    return Head(key, seed, tokens, first_cut, "", parts, blocks, 100 + len(tokens), 50)


def brute_force(heads: list[Head], seed: bytes, tokens: array[int]) -> int:
    best = 0
    for head in heads:
        if head.seed == seed:
            pairs = zip(head.tokens, tokens, strict=False)
            shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(head.tokens), len(tokens)))
            best = max(best, usable(shared, len(head.tokens), head.first_cut, head.checkpoints))
    return best


@given(st.lists(STATES, max_size=12), st.sampled_from(SEEDS), CONTEXTS, st.data())
def test_longest_is_as_long_as_brute_force_finds_but_for_less_than_a_block(
    states: list[tuple[bytes, array[int], float, list[float]]], seed: bytes, tokens: array[int], data: st.DataObject
) -> None:
    index, heads = StateIndex(), {}
    for state_seed, context, cut, lengths in states:
        if context:
            checkpoints = {max(1, int(length * len(context))): 5 for length in lengths}
            head = head_of(state_seed, context, int(cut * len(context)), checkpoints)
            if head.key not in heads:
                heads[head.key] = head
                index.add(head)
    for key in data.draw(st.lists(st.sampled_from(sorted(heads)), unique=True)) if heads else ():
        index.remove(key)
        del heads[key]
    _, blocks = key_and_blocks(seed, pack_tokens(tokens))
    found, best = index.longest(seed, tokens, blocks), brute_force(list(heads.values()), seed, tokens)
    assert (found.num_usable if found else 0) == (best if best >= BLOCK else 0)


def test_index_that_lost_all_its_states_holds_nothing() -> None:
    index = StateIndex()
    heads = [head_of(SEEDS[0], array("I", range(length)), length // 2, {70: 4}) for length in (200, 300)]
    for head in heads:
        index.add(head)
        index.touch(head.key)
    for head in heads:
        index.remove(head.key)
    assert not len(index)
    assert not index._at
    assert not index._cuts


def test_of_equally_long_matches_the_smallest_file_is_read() -> None:
    index = StateIndex()
    tokens = array("I", range(4 * BLOCK))
    for length in (300, 1000, 260):
        index.add(head_of(SEEDS[0], array("I", range(length))))
    found = index.longest(SEEDS[0], tokens, key_and_blocks(SEEDS[0], pack_tokens(tokens))[1])
    assert found is not None
    assert (found.num_usable, found.num_tokens) == (256, 260)


def test_match_of_a_state_that_cannot_be_cut_is_used_to_its_checkpoints() -> None:
    index = StateIndex()
    index.add(head_of(SEEDS[0], array("I", range(200)), 200, {100: 4, 150: 4}))
    query = array("I", [*range(140), 9, 9])
    found = index.longest(SEEDS[0], query, key_and_blocks(SEEDS[0], pack_tokens(query))[1])
    assert found is not None
    assert (found.num_shared, found.num_usable, found.usable(99), found.cuts) == (140, 100, 0, (200, 100, 150))

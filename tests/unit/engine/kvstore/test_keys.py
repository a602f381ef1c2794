"""Tests that everything that changes cells, or their scope, changes the key."""

from __future__ import annotations

from array import array
from hashlib import sha256

import pytest
from hypothesis import given, strategies as st

from cellama.engine.kvstore.keys import BLOCK, block_keys, is_key, key_of, seed_of

SEED = seed_of(b"model", (), "")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=3 * BLOCK)


@given(TOKENS, TOKENS)
def test_keys_are_equal_if_and_only_if_the_tokens_are_equal(one: list[int], other: list[int]) -> None:
    assert (key_of(SEED, one) == key_of(SEED, other)) == (one == other)
    assert is_key(key_of(SEED, one))


@given(TOKENS, st.integers(0, 2 * BLOCK))
def test_block_keys_are_shared_by_contexts_with_the_same_prefix(tokens: list[int], length: int) -> None:
    shorter = block_keys(SEED, tokens[:length])
    assert shorter == block_keys(SEED, tokens)[: len(shorter)]
    assert len(shorter) == min(length, len(tokens)) // BLOCK


def test_seeds_differ_for_different_identities_adapters_scales_and_scopes() -> None:
    seeds = {
        seed_of(b"model", (), ""),
        seed_of(b"other", (), ""),
        seed_of(b"model", (), "tenant"),
        seed_of(b"modeltenant", (), ""),
        seed_of(b"model", (("tenant", 1.0),), ""),
        seed_of(b"model", (("tenant", 0.5),), ""),
        seed_of(b"model", (("tenant", 1.0), ("b", 0.5)), ""),
    }
    assert len(seeds) == 7
    assert seed_of(b"m", (("a", 1.0), ("b", 2.0)), "") == seed_of(b"m", (("b", 2), ("a", 1)), "")


def test_key_is_the_same_in_every_process_and_version() -> None:
    """Check this because files are named by their keys. A change of this value is a change of the format."""
    tokens = list(range(BLOCK + 1))
    block = sha256(SEED + b"".join(token.to_bytes(4, "little") for token in tokens[:BLOCK])).digest()
    assert block_keys(SEED, tokens) == [block]
    end = b"end" + block + (65).to_bytes(8, "little") + (64).to_bytes(4, "little")
    assert key_of(SEED, tokens) == key_of(SEED, array("I", tokens)) == sha256(end).hexdigest()


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"]])
def test_key_of_raises_value_error_for_invalid_token_ids(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be"):
        key_of(SEED, tokens)


@pytest.mark.parametrize("text", ["", "a" * 63, "A" * 64, "a" * 64 + "\n", "../" + "a" * 61, "g" * 64, "a" * 65])
def test_is_key_accepts_only_64_hex_digits(text: str) -> None:
    assert not is_key(text)

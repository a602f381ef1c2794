"""States for tests, and functions that wait for a store."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Mapping, Sequence

from cellama.engine.kvstore.keys import seed_of
from cellama.engine.kvstore.states import StateMatch, StoredState
from cellama.engine.kvstore.store import StateStore

IDENTITY = b"weights and types"
SEED = seed_of(IDENTITY, (), "")
PATIENCE_S = 60.0


def state_of(
    tokens: Sequence[int], size: int = 5000, *, seed: bytes = SEED, first_cut: int = 0, cuts: Sequence[int] = ()
) -> StoredState:
    """Return a state whose bytes are derived from its tokens."""
    drawn = random.Random(repr(list(tokens)))
    checkpoints: Mapping[int, bytes] = {length: drawn.randbytes(size // 10 + 1) for length in cuts}
    return StoredState(seed, tokens, first_cut, drawn.randbytes(size), checkpoints)


def is_equal(one: StoredState | None, other: StoredState) -> bool:
    """Return whether both states are equal."""
    if one is None:
        return False
    heads = [(s.seed, list(s.tokens), s.first_cut, bytes(s.data), s.scope) for s in (one, other)]
    checkpoints = [{length: bytes(data) for length, data in s.checkpoints.items()} for s in (one, other)]
    return heads[0] == heads[1] and checkpoints[0] == checkpoints[1]


def save(store: StateStore, *states: StoredState) -> int:
    """Write states, and return how many were written."""
    for state in states:
        offer(store, state)
    return store.flush(time.monotonic() + PATIENCE_S)


def offer(store: StateStore, state: StoredState) -> bool:
    """Offer a state, and return whether the store accepted it."""
    return store.offer(lambda: state, 1.0, state.num_bytes)


def load(store: StateStore, match: StateMatch | None) -> StoredState | None:
    """Return the state that the store reads for a match."""
    assert match is not None
    loaded: queue.SimpleQueue[StoredState | None] = queue.SimpleQueue()
    store.load(match, loaded.put)
    return loaded.get(timeout=PATIENCE_S)

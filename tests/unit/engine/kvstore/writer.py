"""A process that writes states of very different sizes one after another until it is killed.

Usage: python writer.py DIRECTORY SEED
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from cellama.engine.kvstore.keys import seed_of
from cellama.engine.kvstore.states import StoredState
from cellama.engine.kvstore.store import StateStore

IDENTITY = b"weights and types of cells"
SEED = seed_of(IDENTITY, (), "")
WRITER_QUOTA = 12 << 20
MAX_BYTES = 2 << 20  # per state
FLUSH_S = 60.0


def state_of(number: int, size: int) -> StoredState:
    """Return a state whose bytes are derived from its first token."""
    drawn = random.Random(number)
    tokens = [number, size, *(drawn.randrange(32_000) for _ in range(drawn.randrange(70, 300)))]
    checkpoints = {length: drawn.randbytes(size // 10) for length in (64, 65) if drawn.random() < 0.3}
    return StoredState(SEED, tokens, drawn.choice((0, 66, len(tokens))), drawn.randbytes(size), checkpoints)


def write_for_ever(root: Path, seed: int) -> None:
    drawn, store = random.Random(seed), StateStore(root, WRITER_QUOTA, IDENTITY)
    while True:
        state = state_of(drawn.randrange(1 << 20), drawn.randrange(1000, MAX_BYTES))
        store.offer(partial(replace, state), 1.0, state.num_bytes)
        store.flush(time.monotonic() + FLUSH_S)


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), int(sys.argv[2]))

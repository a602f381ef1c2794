"""Tests of the reading thread: prepared memory, and no waiting for writes."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

import pytest

from cellama.engine.kvstore.catalog import StateCatalog
from cellama.engine.kvstore.keys import seed_of
from cellama.engine.kvstore.states import StoreCounters
from cellama.engine.kvstore.store import StateStore
from tests.conftest import wait_until

from .states import IDENTITY, SEED, load, save, state_of

QUOTA = 10 << 20
TOKENS = list(range(300))


def has_two_pieces(store: StateStore) -> bool:
    """Return whether both buffers are complete. An unfinished one is not continued while the engine computes."""
    return store.warm_bytes > 2 << 20 and not store._reader.memory.needs_buffer


@pytest.mark.skipif(sys.platform != "linux", reason="surplus memory is only returned on Linux")
def test_memory_for_future_states_is_prepared_while_the_engine_is_idle(tmp_path: Path) -> None:
    with closing(StateStore(tmp_path, QUOTA, IDENTITY)) as store:
        save(store, state_of(TOKENS, 1 << 20))
    with closing(StateStore(tmp_path, QUOTA, IDENTITY, warm_bytes=5 << 19)) as store:  # two states
        wait_until(lambda: has_two_pieces(store), "memory for two states")
        store.note_busy(True)
        for left in (1, 0, 0):
            assert load(store, store.longest(SEED, TOKENS)) is not None
            assert store.warm_bytes // (1 << 20) == left
        store.note_busy(False)
        wait_until(lambda: has_two_pieces(store), "memory for two states")


@pytest.mark.skipif(not hasattr(os, "O_NOATIME"), reason="access times can't be left unchanged here")
def test_search_does_not_change_the_access_time_of_the_directory(tmp_path: Path) -> None:
    """Check this because the update would wait for the file system's journal, and thus for writes."""
    with closing(StateStore(tmp_path, QUOTA, IDENTITY)) as store:
        save(store, state_of(TOKENS))
        folder = store.directory.find(state_of(TOKENS).key)[0].parent
    os.utime(folder, (1, folder.stat().st_mtime))  # when no thread scans it any more
    assert StateCatalog(folder, StoreCounters()).longest(SEED, TOKENS) is not None
    assert folder.stat().st_atime == 1


def test_used_bytes_include_the_states_of_all_models(tmp_path: Path) -> None:
    with closing(StateStore(tmp_path, QUOTA, IDENTITY)) as one, closing(StateStore(tmp_path, QUOTA, b"other")) as other:
        save(one, state_of(TOKENS))
        save(other, state_of(range(9), seed=seed_of(b"other", (), "")))
        num_bytes = sum(file.num_bytes for file in one.directory.states())
    with closing(StateStore(tmp_path, QUOTA, IDENTITY)) as store:
        wait_until(lambda: store.used_bytes == num_bytes > 10_000, "a count")

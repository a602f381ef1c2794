"""Tests of the store: states are shared between processes, and problems with the directory only cost time."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from cellama.engine.kvstore import catalog, directory as directory_module
from cellama.engine.kvstore.keys import key_of, seed_of
from cellama.engine.kvstore.state_file import read_head
from cellama.engine.kvstore.states import StateHead, StoredState
from cellama.engine.kvstore.store import StateStore

from ....conftest import EXAMPLES, PATIENCE_S
from .states import IDENTITY, SEED, is_equal, load, offer, save, state_of

QUOTA = 10 << 20
Start = Callable[..., StateStore]
TOKENS = list(range(300))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that opens stores on one directory, and close them at the end.

    Searches wait for a running scan, however long it takes.
    """
    monkeypatch.setattr(catalog, "SCAN_TIMEOUT_S", PATIENCE_S)
    stores: list[StateStore] = []

    def new(quota: int = QUOTA, identity: bytes = IDENTITY, folder: str = "kv", **options: int) -> StateStore:
        stores.append(StateStore(tmp_path / folder, quota, identity, **options))
        return stores[-1]

    yield new
    for store in stores:
        store.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"cellama-kv-reader", "cellama-kv-writer"}


def clear(store: StateStore) -> None:
    store.directory.remove(file.path for file in store.directory.states())


def lengths(store: StateStore) -> list[int]:
    """Return the number of tokens of each state in the directory."""
    heads = [read_head(file.path) for file in store.directory.states()]
    return sorted(len(head.tokens) for head in heads if isinstance(head, StateHead))


def test_saved_state_is_found_by_other_stores_and_after_a_restart(start: Start) -> None:
    one, other = start(), start()
    assert other.longest(SEED, TOKENS) is None
    state = state_of(TOKENS, first_cut=200, cuts=(100, 150))
    assert save(one, state) == 1
    for store in (one, other, start()):
        match = store.longest(SEED, [*TOKENS[:170], 9, 9])
        assert match is not None
        assert (len(match.head.tokens), match.num_shared, match.num_usable, match.head.key) == (
            300,
            170,
            150,
            state.key,
        )
        found = load(store, match)
        assert found is not None
        assert is_equal(found, state)
        assert store.counters.hits == 1
        assert store.context(state.key) == (SEED, found.tokens)
    os.unlink(one.directory.find(state.key)[0])
    assert one.longest(SEED, TOKENS) is other.longest(SEED, TOKENS) is one.context(state.key) is None


def test_state_is_not_found_with_another_scope_adapter_or_model(start: Start) -> None:
    save(start(), state_of(TOKENS))
    store = start()
    for seed in (seed_of(IDENTITY, (), "tenant"), seed_of(IDENTITY, (("a", 1.0),), ""), seed_of(b"other", (), "")):
        assert store.longest(seed, TOKENS) is None
    assert start(identity=b"other").longest(SEED, TOKENS) is None
    assert start(identity=b"other").context(key_of(SEED, TOKENS)) is None


@settings(max_examples=10 * EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200)), min_size=1, max_size=5), st.integers(0, 2))
def test_match_is_the_longest_prefix_and_the_loaded_state_is_unchanged(
    start: Start, contexts: list[tuple[int, int]], asked: int
) -> None:
    store = start()
    saved = {state.key: state for state in (state_of([*range(100), *[kind] * more]) for kind, more in contexts)}
    save(store, *saved.values())
    query = [*range(100), *[asked] * 150]
    match = store.longest(SEED, query)
    assert match is not None
    found = load(store, match)
    assert found is not None
    assert list(found.tokens[: match.num_usable]) == query[: match.num_usable]
    assert match.num_usable == max(100 + min(150, more) * (kind == asked) for kind, more in contexts)
    if match.head.key in saved:
        assert is_equal(found, saved[match.head.key])
    clear(store)


def test_stored_state_is_not_written_again_but_is_marked_as_used(start: Start) -> None:
    store = start()
    save(store, state_of(TOKENS))
    path = store.directory.find(key_of(SEED, TOKENS))[0]
    os.utime(path, (1, 1))
    assert save(start(), state_of(TOKENS), state_of(TOKENS[:200])) == 0
    assert path.stat().st_mtime > 1
    assert lengths(store) == [300]


def test_longer_state_replaces_earlier_turns(start: Start) -> None:
    store = start()
    save(store, state_of(TOKENS[:100]), state_of(TOKENS[:200]))
    assert save(store, state_of(TOKENS)) == 1
    assert lengths(store) == [300]
    store.directory.pin(key_of(SEED, TOKENS))
    save(store, state_of([*TOKENS, 1]), state_of([*TOKENS, 1, 2], first_cut=302))
    assert lengths(store) == [300, 301, 302]


def test_short_state_is_not_replaced_by_a_much_larger_state(start: Start) -> None:
    store = start()
    assert save(store, state_of(TOKENS[:100], 1000)) == 1
    assert save(store, state_of(TOKENS, 100_000)) == 1
    match = store.longest(SEED, TOKENS[:100])
    assert match is not None
    assert len(match.head.tokens) == 100


def test_make_callback_runs_in_the_writing_thread_and_may_return_none(start: Start) -> None:
    store, names = start(), []

    def make() -> StoredState:
        names.append(threading.current_thread().name)
        return state_of(TOKENS)

    def fail() -> StoredState:
        raise RuntimeError("the cells are gone")

    for maker in (make, fail, lambda: None):
        assert store.offer(maker, 1.0, 5000)
    assert store.flush(float("inf")) == 1
    assert names == ["cellama-kv-writer"]
    assert store.counters.drops == 2


def test_damaged_file_is_removed_and_can_be_written_again(start: Start) -> None:
    store = start()
    save(store, state_of(TOKENS))
    match = store.longest(SEED, TOKENS)
    assert match is not None
    path = store.directory.find(match.head.key)[0]
    os.truncate(path, 3000)
    assert load(store, match) is None
    assert store.counters.misses == 1
    assert not path.exists()
    assert load(store, match) is None
    assert store.counters.misses == 2
    assert save(store, state_of(TOKENS)) == 1
    assert load(store, store.longest(SEED, TOKENS)) is not None


def test_file_that_other_users_can_write_is_ignored_and_not_read_again(start: Start) -> None:
    store = start()
    save(store, state_of(TOKENS))
    match = store.longest(SEED, TOKENS)
    assert match is not None
    path = store.directory.find(match.head.key)[0]
    path.chmod(0o666)
    assert load(store, match) is None
    for _ in range(3):
        path.with_name("notes").touch()
        assert store.longest(SEED, TOKENS) is None
    assert store.counters.misses == 1
    assert path.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_writing_is_suspended_with_one_log_line_when_the_directory_refuses_writes(
    start: Start, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = start()
    save(store, state_of(TOKENS))

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", refuse)
    with caplog.at_level(logging.WARNING, logger="cellama"):
        assert save(store, *(state_of([kind] * 100) for kind in range(5))) == 0
        monkeypatch.setattr(store._writer, "_suspended_until", 0.0)
        assert save(store, state_of([5] * 100)) == 0
    assert len(caplog.records) == 1
    assert "retry_s=60" in caplog.text
    assert not offer(store, state_of([9] * 100))
    assert 2 <= store.counters.drops <= 6  # the others were not accepted
    assert load(store, store.longest(SEED, TOKENS)) is not None
    assert not list(store.directory.root.glob("*/.*.tmp"))


def test_writing_resumes_after_a_suspension_caused_by_a_deleted_directory(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = start()
    save(store, state_of(TOKENS))
    shutil.rmtree(store.directory.root)
    assert store.longest(SEED, TOKENS) is None
    assert save(store, state_of(TOKENS)) == 0
    monkeypatch.setattr(store._writer, "_suspended_until", 0.0)
    assert save(store, state_of(TOKENS)) == 1


def test_unusable_directories_cause_one_log_line_but_no_exception(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for folder in ("file", "file/below", "/proc/none", "x" * 300, "zero\0"):
        store = start(folder=folder)
        assert save(store, state_of(TOKENS)) == 0
        assert store.longest(SEED, TOKENS) is store.context(key_of(SEED, TOKENS)) is None
    assert len(caplog.records) == 5


def test_state_is_dropped_without_suspending_writes_when_its_file_name_is_occupied(start: Start) -> None:
    store = start()
    save(store, state_of(TOKENS))
    (directory,) = {file.path.parent for file in store.directory.states()}
    (directory / f"{key_of(SEED, [7] * 100)}.kv").mkdir()
    assert save(store, state_of([7] * 100), state_of([8] * 100)) == 1
    assert store.counters.drops == 1


def test_state_larger_than_the_quota_is_dropped(start: Start) -> None:
    store = start(quota=4000)
    assert save(store, state_of(TOKENS, 5000)) == 0
    assert store.counters.drops == 1


def test_close_makes_queued_loads_return_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    store = start()
    save(store, state_of(TOKENS))
    match = store.longest(SEED, TOKENS)
    assert match is not None
    reading, may_go_on, loaded = threading.Event(), threading.Event(), []

    def on_loaded(state: StoredState | None) -> None:
        reading.set()
        may_go_on.wait(60)
        loaded.append(state)

    for _ in range(3):
        store.load(match, on_loaded)
    assert reading.wait(60)
    closing = threading.Thread(target=store.close)
    closing.start()
    while store._reader._is_closed is False:
        pass
    may_go_on.set()
    closing.join()
    store.load(match, loaded.append)
    assert [state is not None for state in loaded] == [True, False, False, False]
    assert not offer(store, state_of(TOKENS))


def test_close_abandons_an_unfinished_write(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    store = start()
    create = directory_module.StateDirectory.create

    def create_and_close(*args: object) -> object:
        store._queue.close()
        return create(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(directory_module.StateDirectory, "create", create_and_close)
    assert save(store, state_of(TOKENS, 8 << 20)) == 0
    store.close()
    assert store.counters.drops == 1
    assert not list(store.directory.root.glob("*/*.kv")) + list(store.directory.root.glob("*/.*.tmp"))


def test_file_is_marked_as_used_when_it_is_read(start: Start) -> None:
    store = start()
    save(store, state_of(TOKENS))
    (path,) = store.directory.find(key_of(SEED, TOKENS))
    os.utime(path, (1, 1))
    assert load(store, store.longest(SEED, TOKENS)) is not None
    store.close()
    assert path.stat().st_mtime > 1

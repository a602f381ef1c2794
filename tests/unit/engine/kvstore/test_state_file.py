"""Tests of the file format: valid files are read unchanged, and all others are misses with a reason."""

from __future__ import annotations

import os
import struct
from array import array
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from cellama.engine.kvstore.state_file import CHUNK_BYTES, VERSION, file_bytes, read_head, read_state, write_state
from cellama.engine.kvstore.states import Miss, StateHead, StoredState

from .states import SEED, is_equal, state_of

MOST = 1 << 30


def written(folder: Path, state: StoredState) -> Path:
    path = folder / f"{state.key}.kv"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    head = write_state(descriptor, state, lambda: None)
    os.close(descriptor)
    assert (head.num_bytes, head.key) == (path.stat().st_size, state.key) == (file_bytes(state), path.stem)
    return path


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200),
    size=st.sampled_from([1, 4096, CHUNK_BYTES, CHUNK_BYTES + 1]),
    cuts=st.sets(st.integers(1, 200), max_size=3),
    first_cut=st.integers(0, 200),
    scope=st.text(max_size=20),
)
def test_state_is_unchanged_after_writing_and_reading(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], size: int, cuts: set[int], first_cut: int, scope: str
) -> None:
    checkpoints = {length: bytes([length]) * length for length in cuts if length <= len(tokens)}
    state = StoredState(SEED, tokens, min(first_cut, len(tokens)), bytes(size), checkpoints, scope)
    path = written(tmp_path_factory.getbasetemp(), state)
    head, found = read_head(path), read_state(path, MOST)
    assert isinstance(head, StateHead)
    assert isinstance(found, StoredState)
    assert is_equal(found, state)
    assert (head.tokens, head.seed, head.scope, head.checkpoints) == (
        array("I", tokens), SEED, scope, tuple(sorted(checkpoints)),
    )  # fmt: skip
    assert read_state(path, path.stat().st_size - 1) is Miss.UNREADABLE


def test_partially_written_file_counts_as_damaged_after_each_chunk(tmp_path: Path) -> None:
    state = state_of(range(100), 2 * CHUNK_BYTES)
    path = tmp_path / f"{state.key}.kv"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, file_bytes(state))
    seen: list[object] = []
    write_state(descriptor, state, lambda: seen.append(read_state(path, MOST)))
    os.close(descriptor)
    assert seen == [Miss.DAMAGED] * 2
    assert isinstance(read_state(path, MOST), StoredState)


def test_every_changed_or_missing_byte_is_detected(tmp_path: Path) -> None:
    path = written(tmp_path, state_of(range(3), 8, cuts=(2,)))
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        assert read_state(path, MOST) in (Miss.DAMAGED, Miss.VERSION), place
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read_state(path, MOST) is Miss.DAMAGED, length


@pytest.mark.parametrize("lengths", [(3, 3), (5, 4), (0, 3), (3, 101)])
def test_invalid_checkpoint_lengths_count_as_damage_even_if_the_digest_matches(
    tmp_path: Path, lengths: tuple[int, int]
) -> None:
    path = written(tmp_path, state_of(range(100), cuts=(3, 4)))
    data = bytearray(path.read_bytes())
    (end,) = struct.unpack_from("<I", data, 12)
    for number, length in enumerate(lengths):
        struct.pack_into("<Q", data, end - 32 - (2 - number) * 32, length)
    data[end - 32 : end] = sha256(data[: end - 32]).digest()
    path.write_bytes(data)
    assert read_head(path) is Miss.DAMAGED


def test_misses_report_the_correct_reason(tmp_path: Path) -> None:
    state = state_of(range(100))
    path = written(tmp_path, state)
    assert read_head(path.with_name("0" * 64 + ".kv")) is Miss.VANISHED
    path.chmod(0o640)
    assert read_head(path) is Miss.FOREIGN
    path.chmod(0o600)
    os.rename(path, tmp_path / f"{'0' * 64}.kv")
    assert read_head(tmp_path / f"{'0' * 64}.kv") is Miss.DAMAGED
    assert read_head(tmp_path) is Miss.FOREIGN
    other = bytearray((tmp_path / f"{'0' * 64}.kv").read_bytes())
    other[8] = VERSION + 1
    path.write_bytes(other)
    path.chmod(0o600)
    assert read_head(path) is Miss.VERSION


def test_states_are_read_into_memory_that_the_caller_may_modify(tmp_path: Path) -> None:
    path = written(tmp_path, state_of(range(100), cuts=(50,)))
    found = read_state(path, MOST)
    assert isinstance(found, StoredState)
    for part in (found.data, *found.checkpoints.values()):
        memoryview(part)[:4] = b"mine"
    again = read_state(path, MOST)
    assert isinstance(again, StoredState)
    assert is_equal(again, state_of(range(100), cuts=(50,)))

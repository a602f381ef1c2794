"""Tests with files damaged in every way, and with processes killed during a write.

No model is used. States are random bytes derived from their tokens, so that a wrong state is detected.
"""

from __future__ import annotations

import fcntl
import os
import random
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cellama.engine.kvstore import catalog
from cellama.engine.kvstore.directory import StateDirectory
from cellama.engine.kvstore.states import StateMatch, StoredState
from cellama.engine.kvstore.store import StateStore

from ....conftest import PATIENCE_S
from . import writer
from .damage import KINDS, damage
from .states import is_equal, load, offer
from .writer import IDENTITY, SEED, WRITER_QUOTA, state_of

NUM_DAMAGED = 300
PER_FOLDER = 50
QUOTA = 1 << 30
NUM_GOOD = 2  # undamaged files, which must still be read
NUM_WRITERS, NUM_TORN = 2, 3
MAX_KILLS = 50  # per kill that must leave an unfinished file


def test_damaged_files_count_as_misses_and_other_files_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage half of the files after the store has scanned them, and the others before."""
    monkeypatch.setattr(catalog, "SCAN_TIMEOUT_S", PATIENCE_S)  # searches wait for a running scan
    drawn, found = random.Random(1), Damaged()
    while (left := NUM_DAMAGED - found.files.total()) > 0:
        with tempfile.TemporaryDirectory() as folder:
            _damage_folder(drawn, Path(folder), min(left, PER_FOLDER), found)
    assert set(found.files) == set(KINDS)
    assert not found.wrong.total()
    assert (found.num_uncounted, found.num_good_lost) == (0, 0)


@dataclass
class Damaged:
    """Results of reading damaged files."""

    files: Counter[str] = field(default_factory=Counter)  # number by kind of damage
    wrong: Counter[str] = field(default_factory=Counter)  # number by kind of damage for which a state was returned
    num_uncounted: int = 0
    num_good_lost: int = 0


def _damage_folder(drawn: random.Random, folder: Path, count: int, found: Damaged) -> None:
    first, is_known = drawn.randrange(1 << 20), drawn.random() < 0.5
    states = [state_of(first + number, drawn.choice((3_000, 30_000))) for number in range(count + NUM_GOOD)]
    with closing(StateStore(folder, QUOTA, IDENTITY)) as store:
        for state in states:
            offer(store, state)
        store.flush(time.monotonic() + PATIENCE_S)
        matches = [store.longest(SEED, state.tokens) for state in states]
        paths = [next(iter(store.directory.find(state.key))) for state in states]
        kinds = [damage(drawn, path, paths[count + drawn.randrange(NUM_GOOD)]) for path in paths[:count]]
        found.files.update(kinds)
        if is_known:
            _look(store, states, matches, kinds, found)
    if not is_known:
        with closing(StateStore(folder, QUOTA, IDENTITY)) as store:
            _look(store, states, [store.longest(SEED, state.tokens) for state in states], kinds, found)


def _look(
    store: StateStore, states: list[StoredState], matches: list[StateMatch | None], kinds: list[str], found: Damaged
) -> None:
    for kind, match in zip(kinds, matches, strict=False):
        found.wrong[kind] += match is not None and load(store, match) is not None
    num_misses = store.counters.misses
    unseen = sum(kind == "vanished" and match is None for kind, match in zip(kinds, matches, strict=False))
    found.num_uncounted += max(0, len(kinds) - unseen - num_misses)
    for state, match in list(zip(states, matches, strict=True))[len(kinds) :]:
        found.num_good_lost += match is None or not is_equal(load(store, match), state)


def test_directory_stays_consistent_when_writers_are_killed() -> None:
    """Kill one of several writers at a time during a write, and start another one."""
    drawn, found = random.Random(1), Killed()
    with tempfile.TemporaryDirectory() as path:
        folder = StateDirectory(Path(path), WRITER_QUOTA)
        writers = [_start(folder, drawn) for _ in range(NUM_WRITERS)]
        try:
            while found.num_torn < NUM_TORN and found.num_kills < MAX_KILLS * NUM_TORN:
                victim = drawn.randrange(NUM_WRITERS)
                _wait_for_writing(folder, drawn.randrange(1, 6), found)
                _end(writers[victim])
                found.num_kills += 1
                found.num_torn += num_ownerless(folder) > 0
                _look_at(folder, found)
                StateDirectory(folder.root, WRITER_QUOTA).prepare(folder.directory_of(IDENTITY))  # like the next writer
                writers[victim] = _start(folder, drawn)
        finally:
            for process in writers:
                _end(process)
        _read_all(folder, found)
    assert found.num_torn == NUM_TORN
    assert (found.num_over, found.num_left, found.num_wrong) == (0, 0, 0)
    assert found.num_states > 0


@dataclass
class Killed:
    """Observations of a directory whose writers are killed repeatedly."""

    num_kills: int = 0
    num_torn: int = 0  # kills that left an unfinished file
    num_over: int = 0  # checks that found more bytes than the quota
    num_states: int = 0
    num_wrong: int = 0  # of the states that were read at the end
    num_left: int = 0  # unfinished files after the next start


def _start(folder: StateDirectory, drawn: random.Random) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-P", writer.__file__, str(folder.root), str(drawn.randrange(1 << 20))])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _wait_for_writing(folder: StateDirectory, num_changes: int, found: Killed) -> None:
    """Wait until a number of files were started and one is unfinished. Check the quota in the meantime."""
    deadline = time.monotonic() + PATIENCE_S
    seen: set[str] = set()
    while time.monotonic() < deadline:
        now = drafts(folder)
        seen |= now
        if now and len(seen) >= num_changes:
            return
        if not now:
            _look_at(folder, found)
        time.sleep(0.001)
    raise TimeoutError("the writers write nothing")


def _look_at(folder: StateDirectory, found: Killed) -> None:
    """Check the quota under the lock of the directory. Files can only be renamed at the same time."""
    if not folder.root.joinpath(".lock").exists():
        return
    with folder.locked():
        sizes = {entry.st_ino: entry.st_size for path in folder.root.rglob("*") if (entry := _stat(path))}
    found.num_over += sum(sizes.values()) > WRITER_QUOTA


def _stat(path: Path) -> os.stat_result | None:
    try:
        entry = path.lstat()
    except FileNotFoundError:
        return None
    return entry if stat.S_ISREG(entry.st_mode) else None


def drafts(folder: StateDirectory) -> set[str]:
    """Return the names of the unfinished files."""
    return {path.name for path in folder.root.glob("*/.*.tmp")}


def num_ownerless(folder: StateDirectory) -> int:
    """Return the number of unfinished files whose writer is dead."""
    count = 0
    for path in folder.root.glob("*/.*.tmp"):
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            count += path.exists()
    return count


def _read_all(folder: StateDirectory, found: Killed) -> None:
    with closing(StateStore(folder.root, WRITER_QUOTA, IDENTITY)) as store:
        offer(store, state_of(0, 1000))
        store.flush(time.monotonic() + PATIENCE_S)
        found.num_left = len(drafts(folder))
        for file in folder.states():
            context = store.context(file.key)
            match = store.longest(*context) if context else None
            found.num_states += 1
            saved = state_of(context[1][0], context[1][1]) if context else None
            found.num_wrong += not (match and saved and is_equal(load(store, match), saved))

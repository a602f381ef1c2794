"""Files with KV states damaged in every way, and processes killed while they write: what is read, and what stays?

No model is run: states are random bytes that follow from their tokens, so that a wrong one would be noticed.
"""

from __future__ import annotations

import argparse
import fcntl
import multiprocessing
import os
import queue
import random
import stat
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cellama.bench.harness.report import Report
from cellama.engine.kvstore.files.folder import Folder
from cellama.engine.kvstore.keys import seed_of
from cellama.engine.kvstore.states import KeptState, Match
from cellama.engine.kvstore.store import StateStore

from .kept_damage import damage

MODEL = "none"
IDENTITY = b"weights and types of cells"
SEED = seed_of(IDENTITY, (), "")
PER_FOLDER = 50
QUOTA = 1 << 30
NUM_GOOD = 2  # beside them: they must still be read
PATIENCE_S = 60.0
MOST_IN_VAIN = 50  # kills for each that is to leave one
WRITER_QUOTA = 12 << 20
MOST_BYTES = 2 << 20  # of one state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--damaged", type=int, default=10_000, help="files to damage")
    parser.add_argument("--kills", type=int, default=50, help="kill -9 that leave a half-written file behind")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    started = time.monotonic()
    damaged = damage_files(args.damaged, args.seed)
    rows: list[dict[str, Any]] = [
        {"damage": kind, "files": count, "wrong": damaged.wrong[kind]} for kind, count in sorted(damaged.files.items())
    ]
    rows.append(damaged.row() | {"seconds": round(time.monotonic() - started, 1)})
    started = time.monotonic()
    rows.append(kill_writers(args.kills, args.seed).row() | {"seconds": round(time.monotonic() - started, 1)})
    return Report(rows, caveats=["wrong: a state was given of a damaged file, or another one than was saved."])


# Damage


@dataclass
class Damaged:
    """What became of damaged files."""

    files: Counter[str] = field(default_factory=Counter)  # by kind of damage
    wrong: Counter[str] = field(default_factory=Counter)  # the same: a state was given nevertheless
    misses: Counter[str] = field(default_factory=Counter)  # by what the store says of them
    num_uncounted: int = 0
    num_good_lost: int = 0

    def row(self) -> dict[str, Any]:
        return {
            "damaged": self.files.total(),
            "wrong": self.wrong.total(),
            "not counted": self.num_uncounted,
            "good ones lost": self.num_good_lost,
            "misses": ", ".join(f"{count} {reason}" for reason, count in sorted(self.misses.items())),
        }


def damage_files(count: int, seed: int) -> Damaged:
    """Half of the files are damaged after the store has looked at them, the others before."""
    drawn, result = random.Random(seed), Damaged()
    while (left := count - result.files.total()) > 0:
        with tempfile.TemporaryDirectory() as folder:
            _damage_folder(drawn, Path(folder), min(left, PER_FOLDER), result)
    return result


def _damage_folder(drawn: random.Random, folder: Path, count: int, result: Damaged) -> None:
    first, is_known = drawn.randrange(1 << 20), drawn.random() < 0.5
    states = [state_of(first + number, drawn.choice((3_000, 30_000))) for number in range(count + NUM_GOOD)]
    with closing(StateStore(folder, QUOTA, IDENTITY)) as store:
        for state in states:
            store.offer(state, 1.0)
        store.flush(time.monotonic() + PATIENCE_S)
        matches = [store.longest(SEED, state.tokens) for state in states]
        paths = [next(iter(store.folder.find(state.key))) for state in states]
        kinds = [damage(drawn, path, paths[count + drawn.randrange(NUM_GOOD)]) for path in paths[:count]]
        result.files.update(kinds)
        if is_known:
            _look(store, states, matches, kinds, result)
    if not is_known:
        with closing(StateStore(folder, QUOTA, IDENTITY)) as store:
            _look(store, states, [store.longest(SEED, state.tokens) for state in states], kinds, result)


def _look(
    store: StateStore, states: list[KeptState], matches: list[Match | None], kinds: list[str], result: Damaged
) -> None:
    for kind, match in zip(kinds, matches, strict=False):
        result.wrong[kind] += match is not None and load(store, match) is not None
    misses = store.counters.misses
    result.misses.update(misses)
    unseen = sum(kind == "vanished" and match is None for kind, match in zip(kinds, matches, strict=False))
    result.num_uncounted += max(0, len(kinds) - unseen - sum(misses.values()))
    for state, match in list(zip(states, matches, strict=True))[len(kinds) :]:
        result.num_good_lost += match is None or not is_equal(load(store, match), state)


def load(store: StateStore, match: Match) -> KeptState | None:
    """What the store reads for a match."""
    loaded: queue.SimpleQueue[KeptState | None] = queue.SimpleQueue()
    store.load(match, loaded.put)
    return loaded.get(timeout=PATIENCE_S)


def state_of(number: int, size: int) -> KeptState:
    """A state whose bytes follow from its first token."""
    drawn = random.Random(number)
    tokens = [number, size, *(drawn.randrange(32_000) for _ in range(drawn.randrange(70, 300)))]
    checkpoints = {length: drawn.randbytes(size // 10) for length in (64, 65) if drawn.random() < 0.3}
    return KeptState(SEED, tokens, drawn.choice((0, 66, len(tokens))), drawn.randbytes(size), checkpoints)


def is_equal(one: KeptState | None, other: KeptState) -> bool:
    """True if they are the same state."""
    if one is None or (one.key, one.first_cut, bytes(one.data)) != (other.key, other.first_cut, bytes(other.data)):
        return False
    parts = [{length: bytes(data) for length, data in state.checkpoints.items()} for state in (one, other)]
    return parts[0] == parts[1]


# Kills


@dataclass
class Killed:
    """What was seen of a folder whose writers are killed again and again."""

    num_kills: int = 0
    num_looks: int = 0
    num_torn: int = 0  # kills that left a half-written file behind
    most_bytes: int = 0
    num_over: int = 0  # looks that found more than the quota
    num_states: int = 0
    num_wrong: int = 0  # of those that were read at the end
    num_left: int = 0  # half-written files after the next start

    def row(self) -> dict[str, Any]:
        return {
            "kills": self.num_kills,
            "torn": self.num_torn,
            "looks": self.num_looks,
            "most / quota": round(self.most_bytes / WRITER_QUOTA, 3),
            "over quota": self.num_over,
            "left over": self.num_left,
            "states read": self.num_states,
            "wrong": self.num_wrong,
        }


def kill_writers(num_kills: int, seed: int, num_writers: int = 2) -> Killed:
    """Writers share a folder; one is killed at a time, in the midst of a file, and another one takes its place."""
    drawn, result = random.Random(seed), Killed()
    context = multiprocessing.get_context("forkserver")  # imports once, and forks what has no threads
    context.set_forkserver_preload([StateStore.__module__])
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path), WRITER_QUOTA)
        writers = [_start(context, folder.root, drawn.randrange(1 << 20)) for _ in range(num_writers)]
        try:
            while result.num_torn < num_kills and result.num_kills < MOST_IN_VAIN * num_kills:
                victim = drawn.randrange(num_writers)
                _wait_for_writing(folder, drawn.randrange(1, 6), result)
                writers[victim].kill()
                writers[victim].join()
                result.num_kills += 1
                result.num_torn += num_ownerless(folder) > 0
                _look_at(folder, result)
                Folder(folder.root, WRITER_QUOTA).prepare(folder.directory_of(IDENTITY))  # as its successor does
                writers[victim] = _start(context, folder.root, drawn.randrange(1 << 20))
        finally:
            for writer in writers:
                writer.kill()
                writer.join()
        _read_all(folder, result)
    return result


def _start(context: ForkServerContext, root: Path, seed: int) -> BaseProcess:
    process = context.Process(target=write_for_ever, args=(root, seed), daemon=True)
    process.start()
    return process


def write_for_ever(root: Path, seed: int) -> None:
    """What a writer does: states of very different sizes, one after another, until it is killed."""
    drawn, store = random.Random(seed), StateStore(root, WRITER_QUOTA, IDENTITY)
    while True:
        store.offer(state_of(drawn.randrange(1 << 20), drawn.randrange(1000, MOST_BYTES)), 1.0)
        store.flush(time.monotonic() + PATIENCE_S)


def _wait_for_writing(folder: Folder, num_changes: int, result: Killed) -> None:
    """Until files have come so many times, and one is being written; the quota is looked at meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    seen: set[str] = set()
    while time.monotonic() < deadline:
        now = drafts(folder)
        seen |= now
        if now and len(seen) >= num_changes:
            return
        if not now:
            _look_at(folder, result)
        time.sleep(0.001)
    raise TimeoutError("the writers write nothing")


def _look_at(folder: Folder, result: Killed) -> None:
    """Under the folder's lock: files only get their names meanwhile, which does not change what there is."""
    if not folder.root.joinpath(".lock").exists():
        return
    with folder.locked():
        sizes = {told.st_ino: told.st_size for path in folder.root.rglob("*") if (told := _stat(path))}
    result.num_looks += 1
    result.most_bytes = max(result.most_bytes, sum(sizes.values()))
    result.num_over += sum(sizes.values()) > WRITER_QUOTA


def _stat(path: Path) -> os.stat_result | None:
    try:
        told = path.lstat()
    except FileNotFoundError:
        return None
    return told if stat.S_ISREG(told.st_mode) else None


def drafts(folder: Folder) -> set[str]:
    """Files that are being written, or were."""
    return {path.name for path in folder.root.glob("*/.*.tmp")}


def num_ownerless(folder: Folder) -> int:
    """Files that were being written by a process that is gone."""
    count = 0
    for path in folder.root.glob("*/.*.tmp"):
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            count += path.exists()
    return count


def _read_all(folder: Folder, result: Killed) -> None:
    with closing(StateStore(folder.root, WRITER_QUOTA, IDENTITY)) as store:
        store.offer(state_of(0, 1000), 1.0)
        store.flush(time.monotonic() + PATIENCE_S)
        result.num_left = len(drafts(folder))
        for file in folder.states():
            context = store.context(file.key)
            match = store.longest(*context) if context else None
            result.num_states += 1
            saved = state_of(context[1][0], context[1][1]) if context else None
            result.num_wrong += not (match and saved and is_equal(load(store, match), saved))

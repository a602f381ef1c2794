"""What one identity's directory has, as an index in memory that keeps up with other processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .counters import Tally
from .files.folder import STATE
from .files.head import read_head
from .index import StateIndex
from .keys import as_array, block_keys, is_key
from .states import Head, KeptState, Match, Miss, usable

SETTLED_NS = 100_000_000  # a file may come at the same time of modification, as coarse as it is, as the last one did
MOST_SLACK = 2.0  # times as much to read: a longer state that stands in for a shorter one
SCAN_PATIENCE_S = 0.1  # another thread is reading heads: what is known by then has to do, a request waits

_Stamp = tuple[int, int, int]


class Catalog:
    """Any thread. The lock guards the index, and is never held while files are looked at."""

    def __init__(self, directory: Path, tally: Tally) -> None:
        self.directory = directory
        self._tally = tally
        self._lock = threading.Lock()
        self._index = StateIndex()
        self._scanning = threading.Lock()
        self._seen_ns: int | None = None  # the directory's time of modification when its names were read
        self._bad: dict[str, _Stamp] = {}  # key → what was no state then

    def __len__(self) -> int:
        return len(self._index)

    @property
    def largest(self) -> int:
        """Bytes of the largest file that is known."""
        with self._lock:
            return max((head.num_bytes for head in self._index.heads()), default=0)

    def longest(self, seed: bytes, tokens: Sequence[int]) -> Match | None:
        """The longest usable prefix of the tokens in any file."""
        if not len(self._index) and self._is_settled():
            return None
        self.refresh()
        ids = as_array(tokens)
        blocks = block_keys(seed, ids)
        with self._lock:
            return self._index.longest(seed, ids, blocks)

    def get(self, key: str) -> Head | None:
        """The head of the file of that key."""
        if not is_key(key):
            return None
        self.refresh()
        with self._lock:
            return self._index.get(key)

    def replaced_by(self, state: KeptState, num_bytes: int) -> list[str]:
        """The keys of shorter states for which this one will do, as it can be cut to them and is not much larger."""
        tokens = as_array(state.tokens)
        blocks = block_keys(state.seed, tokens)
        lengths = sorted(state.checkpoints)
        with self._lock:
            heads = self._index.prefixes(state.seed, tokens, blocks)
        return [
            head.key
            for head in heads
            if num_bytes <= MOST_SLACK * head.num_bytes
            and usable(len(head.tokens), len(tokens), state.first_cut, lengths) == len(head.tokens)
        ]

    def path_of(self, key: str) -> Path:
        """Where the state of a key lies, or would."""
        return self.directory / f"{key}{STATE}"

    def add(self, head: Head) -> None:
        with self._lock:
            self._index.add(head)

    def remove(self, key: str) -> None:
        with self._lock:
            self._index.remove(key)

    def refuse(self, key: str) -> None:
        """The file of that key gives no state: it is not looked at again unless it changes."""
        stamp = _stamp(self.path_of(key))
        if stamp is not None:
            self._bad[key] = stamp
        self.remove(key)

    def touch(self, key: str) -> None:
        with self._lock:
            self._index.touch(key)

    def refresh(self) -> None:
        """Files that came or went since the last look are known, or another thread is at it for long already."""
        if self._is_settled() or not self._scanning.acquire(timeout=SCAN_PATIENCE_S):
            return
        try:
            if not self._is_settled():
                self._scan()
        finally:
            self._scanning.release()

    def _is_settled(self) -> bool:
        return self._seen_ns is not None and self._seen_ns == _modified_ns(self.directory)

    def _scan(self) -> None:
        modified_ns = _modified_ns(self.directory)
        try:
            names = _names_in(self.directory)
        except (OSError, ValueError):
            names = []
        keys = {name.removesuffix(STATE) for name in names if name.endswith(STATE)}
        keys = {key for key in keys if is_key(key)}
        with self._lock:
            known = set(self._index.keys())
            for key in known - keys:
                self._index.remove(key)
        self._bad = {key: stamp for key, stamp in self._bad.items() if key in keys}
        for key in keys - known:
            self._look_at(key)
        is_old = abs(time.time_ns() - modified_ns) > SETTLED_NS
        self._seen_ns = modified_ns if is_old else None

    def _look_at(self, key: str) -> None:
        path = self.path_of(key)
        stamp = _stamp(path)
        if stamp is None or self._bad.get(key) == stamp:
            return
        head = read_head(path)
        if isinstance(head, Head):
            self._bad.pop(key, None)
            self.add(head)
        else:
            self._bad[key] = stamp
            if head is not Miss.VANISHED:
                self._tally.miss(head)


def _stamp(path: Path) -> _Stamp | None:
    try:
        told = path.lstat()
    except OSError:
        return None
    return told.st_ino, told.st_mtime_ns, told.st_size


def _names_in(directory: Path) -> list[str]:
    """Without noting the time of access: that waits for the file system's journal, and so for the fsync of a file."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_NOATIME", 0))
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _modified_ns(directory: Path) -> int:
    """-1 while it is not there."""
    try:
        return directory.stat().st_mtime_ns
    except (OSError, ValueError):  # a zero byte in a path is a ValueError
        return -1

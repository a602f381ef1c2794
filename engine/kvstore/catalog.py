"""The states of one identity: an index in memory that follows what all processes do in the directory."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

from .counters import StoreCounters
from .folder import STATE
from .keys import BLOCK, as_array, block_keys, is_key
from .state_file import read_head
from .states import KeptState, Miss, StateHead, StateMatch, usable

SETTLED_NS = 100_000_000  # times of modification are coarse: the next file may have the same time as the last one
MAX_SLACK = 2.0  # a longer state replaces a shorter one if it is at most so many times as much to read
SCAN_PATIENCE_S = 0.1  # a request waits so long for another thread that reads heads, then uses what is known


class StateCatalog:
    """Any thread. The lock guards the index, and is never held while files are read."""

    def __init__(self, directory: Path, counters: StoreCounters) -> None:
        self.directory = directory
        self._counters = counters
        self._lock = threading.Lock()
        self._heads: dict[str, StateHead] = {}  # by key
        self._groups: dict[bytes, dict[str, StateHead]] = {}  # by the key of the first block: only these can match
        self._scanning = threading.Lock()
        self._seen_ns: int | None = None  # the directory's time of modification when its names were read
        self._bad: set[str] = set()  # keys of files that gave no state: none is read again while it is there

    @property
    def largest(self) -> int:
        """Bytes of the largest file that is known."""
        with self._lock:
            return max((head.num_bytes for head in self._heads.values()), default=0)

    def path_of(self, key: str) -> Path:
        """Return the path of the state of a key, whether or not it exists."""
        return self.directory / f"{key}{STATE}"

    # Searching

    def longest(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None:
        """Return the file with the longest usable prefix of the tokens; of equally long ones the smallest."""
        if not self._heads and self._is_settled():
            return None
        self.refresh()
        ids = as_array(tokens)
        blocks = block_keys(seed, ids)
        return longest_match(self._group_of(blocks), ids, blocks)

    def get(self, key: str) -> StateHead | None:
        """Return the head of the file of a key."""
        self.refresh()
        with self._lock:
            return self._heads.get(key)

    def replaced_by(self, state: KeptState, num_bytes: int) -> list[str]:
        """Return the keys of shorter states that a file of this state makes superfluous.

        The longer state must be one that can be cut to them, and not much more to read.
        """
        ids = as_array(state.tokens)
        blocks, lengths = block_keys(state.seed, ids), sorted(state.checkpoints)
        return [
            head.key
            for head in self._group_of(blocks)
            if _is_beginning(head, ids, blocks)
            and num_bytes <= MAX_SLACK * head.num_bytes
            and usable(len(head.tokens), len(ids), state.first_cut, lengths) == len(head.tokens)
        ]

    def _group_of(self, blocks: list[bytes]) -> list[StateHead]:
        with self._lock:
            return list(self._groups.get(blocks[0], {}).values()) if blocks else []

    # The index

    def add(self, head: StateHead) -> None:
        """The state can be found from now on. A state of less than a block never is: it is computed faster."""
        with self._lock:
            self._heads[head.key] = head
            if head.blocks:
                self._groups.setdefault(head.blocks[0], {})[head.key] = head

    def remove(self, key: str) -> None:
        """The state can't be found any more."""
        with self._lock:
            head = self._heads.pop(key, None)
            if head is not None and head.blocks:
                group = self._groups[head.blocks[0]]
                del group[key]
                if not group:
                    del self._groups[head.blocks[0]]

    def refuse(self, key: str) -> None:
        """The file of that key gives no state: it is not read again while it is there."""
        self._bad.add(key)
        self.remove(key)

    # Following the directory

    def refresh(self) -> None:
        """Read the heads of files that came since the last look, unless another thread does so for long already."""
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
            known = set(self._heads)
        for key in known - keys:
            self.remove(key)
        self._bad &= keys
        for key in keys - known - self._bad:
            head = read_head(self.path_of(key))
            if isinstance(head, StateHead):
                self.add(head)
            elif head is not Miss.VANISHED:
                self._bad.add(key)
                self._counters.add(misses=1)
        is_old = abs(time.time_ns() - modified_ns) > SETTLED_NS
        self._seen_ns = modified_ns if is_old else None


def longest_match(heads: Iterable[StateHead], tokens: array[int], blocks: list[bytes]) -> StateMatch | None:
    """Return the longest usable prefix of `tokens`, whose block keys are `blocks`; of equally long ones the smallest.

    A block key stands for all tokens up to its end, for the adapters and for the scope. So one comparison tells that a
    state has no longer prefix than the best so far, and few states are compared token by token. Pure.
    """
    best: StateMatch | None = None
    for head in heads:
        needed = BLOCK if best is None else best.num_usable
        # The fewest tokens that the state must share to be the better one.
        least = needed if best is None or head.num_bytes < best.head.num_bytes else needed + 1
        if head.first_cut > least:
            least = min(cut for cut in (head.first_cut, *head.checkpoints) if cut >= least)
        depth = least // BLOCK
        if depth > min(len(blocks), len(head.blocks)) or head.blocks[depth - 1] != blocks[depth - 1]:
            continue
        if head.tokens[depth * BLOCK : least] != tokens[depth * BLOCK : least]:
            continue
        shared = _num_shared(head, tokens, blocks, depth)
        count = head.usable(shared)
        if count > needed or (count == needed and (best is None or head.num_bytes < best.head.num_bytes)):
            best = StateMatch(head, shared)
    return best


def _num_shared(head: StateHead, tokens: array[int], blocks: list[bytes], known: int) -> int:
    """Return how many first tokens are the same, of which `known` blocks are."""
    most = min(len(blocks), len(head.blocks))
    while known < most and head.blocks[known] == blocks[known]:
        known += 1
    count, end = known * BLOCK, min(len(head.tokens), len(tokens))
    while count < end and head.tokens[count] == tokens[count]:
        count += 1
    return count


def _is_beginning(head: StateHead, tokens: array[int], blocks: list[bytes]) -> bool:
    """True if `tokens` are those of the head, and more."""
    depth, count = len(head.blocks), len(head.tokens)
    if count >= len(tokens) or head.blocks[depth - 1] != blocks[depth - 1]:
        return False
    return head.tokens[depth * BLOCK :] == tokens[depth * BLOCK : count]


def _names_in(directory: Path) -> list[str]:
    """List a directory without noting the time of access, which would wait for the fsync of a file."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_NOATIME", 0))
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _modified_ns(directory: Path) -> int:
    """Return the time of modification, or -1 while there is no directory."""
    try:
        return directory.stat().st_mtime_ns
    except (OSError, ValueError):  # a zero byte in a path is a ValueError
        return -1

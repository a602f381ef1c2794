"""An in-memory index of the states that share one identity, which is a digest of the model and its settings.

The index reflects changes that any process makes in the directory.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

from .directory import STATE
from .keys import BLOCK, as_array, block_keys, is_key
from .state_file import read_head
from .states import Miss, StateHead, StateMatch, StoreCounters, StoredState, usable

# Nanoseconds after the last change of the directory until its list of names counts as complete. File systems record
# modification times coarsely, so a later file can have the same time.
SETTLED_NS = 100_000_000
MAX_SIZE_RATIO = 2.0  # a longer state replaces a shorter one only if its file is at most this many times as large
SCAN_TIMEOUT_S = 0.1  # seconds that a request waits for another thread's scan before it uses the index as it is


class StateCatalog:
    """The index of one identity's directory. This class is thread-safe.

    The lock protects the index and is not held during I/O.
    """

    def __init__(self, directory: Path, counters: StoreCounters) -> None:
        self.directory = directory
        self._counters = counters
        self._lock = threading.Lock()
        self._heads: dict[str, StateHead] = {}  # headers by key
        # Headers by the key of their first block. A prompt is compared only with headers that share its first block.
        self._groups: dict[bytes, dict[str, StateHead]] = {}
        self._scan_lock = threading.Lock()
        self._scanned_ns: int | None = None  # modification time of the directory when its names were listed
        self._bad: set[str] = set()  # keys of files without a usable state; they are not read again while they exist

    @property
    def max_file_bytes(self) -> int:
        """The size of the largest known file in bytes."""
        with self._lock:
            return max((head.num_bytes for head in self._heads.values()), default=0)

    def path_of(self, key: str) -> Path:
        """Return the path of the state with this key, even if the file doesn't exist."""
        return self.directory / f"{key}{STATE}"

    # Searching

    def longest(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None:
        """Return the file with the longest usable prefix of the tokens.

        If several files contain the prefix, return the smallest.
        """
        if not self._heads and self._is_up_to_date():
            return None
        self.refresh()
        ids = as_array(tokens)
        blocks = block_keys(seed, ids)
        return longest_match(self._group_of(blocks), ids, blocks)

    def get(self, key: str) -> StateHead | None:
        """Return the header of the file with this key, or None if the file doesn't exist."""
        self.refresh()
        with self._lock:
            return self._heads.get(key)

    def replaced_by(self, state: StoredState, num_bytes: int) -> list[str]:
        """Return the keys of shorter states that become redundant when this state is written as a file of `num_bytes`.

        A shorter state is redundant if the longer state can be truncated to the shorter one and is not much larger.
        """
        ids = as_array(state.tokens)
        blocks, lengths = block_keys(state.seed, ids), sorted(state.checkpoints)
        return [
            head.key
            for head in self._group_of(blocks)
            if _is_proper_prefix(head, ids, blocks)
            and num_bytes <= MAX_SIZE_RATIO * head.num_bytes
            and usable(len(head.tokens), len(ids), state.first_cut, lengths) == len(head.tokens)
        ]

    def _group_of(self, blocks: list[bytes]) -> list[StateHead]:
        with self._lock:
            return list(self._groups.get(blocks[0], {}).values()) if blocks else []

    # The index

    def add(self, head: StateHead) -> None:
        """Add a state to the index.

        A state that is shorter than a block never matches, because computing its tokens is faster.
        """
        with self._lock:
            self._heads[head.key] = head
            if head.blocks:
                self._groups.setdefault(head.blocks[0], {})[head.key] = head

    def remove(self, key: str) -> None:
        """Remove a state from the index. Calling this method again has no effect."""
        with self._lock:
            head = self._heads.pop(key, None)
            if head is not None and head.blocks:
                group = self._groups[head.blocks[0]]
                del group[key]
                if not group:
                    del self._groups[head.blocks[0]]

    def reject(self, key: str) -> None:
        """Remove a state from the index, and ignore its file for as long as the file exists."""
        self._bad.add(key)
        self.remove(key)

    # Following the directory

    def refresh(self) -> None:
        """Read the headers of new files.

        If another thread is already reading headers, wait at most SCAN_TIMEOUT_S for that thread.
        """
        if self._is_up_to_date() or not self._scan_lock.acquire(timeout=SCAN_TIMEOUT_S):
            return
        try:
            if not self._is_up_to_date():
                self._scan()
        finally:
            self._scan_lock.release()

    def _is_up_to_date(self) -> bool:
        return self._scanned_ns is not None and self._scanned_ns == _modified_ns(self.directory)

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
        is_settled = abs(time.time_ns() - modified_ns) > SETTLED_NS
        self._scanned_ns = modified_ns if is_settled else None


def longest_match(heads: Iterable[StateHead], tokens: array[int], blocks: list[bytes]) -> StateMatch | None:
    """Return the match with the longest usable prefix of `tokens`, or None.

    If several files have equally long prefixes, the smallest file is returned. `blocks` contains the block keys of
    `tokens`. A block key identifies the adapters, the scope, and all tokens up to the end of the block. Comparing a
    single block key is therefore enough to exclude a state whose prefix can't be longer than the best match. Only a few
    states are compared token by token. This function is pure.
    """
    best: StateMatch | None = None
    for head in heads:
        best_length = BLOCK if best is None else best.num_usable
        # The smallest number of shared tokens with which this state would be the better match.
        min_shared = best_length if best is None or head.num_bytes < best.head.num_bytes else best_length + 1
        if head.first_cut > min_shared:
            min_shared = min(cut for cut in (head.first_cut, *head.checkpoints) if cut >= min_shared)
        depth = min_shared // BLOCK
        if depth > min(len(blocks), len(head.blocks)) or head.blocks[depth - 1] != blocks[depth - 1]:
            continue
        if head.tokens[depth * BLOCK : min_shared] != tokens[depth * BLOCK : min_shared]:
            continue
        shared = _num_shared(head, tokens, blocks, depth)
        count = head.usable(shared)
        if count > best_length or (count == best_length and (best is None or head.num_bytes < best.head.num_bytes)):
            best = StateMatch(head, shared)
    return best


def _num_shared(head: StateHead, tokens: array[int], blocks: list[bytes], num_equal: int) -> int:
    """Return the length of the common prefix in tokens.

    The caller already knows that the first `num_equal` blocks are equal.
    """
    num_blocks = min(len(blocks), len(head.blocks))
    while num_equal < num_blocks and head.blocks[num_equal] == blocks[num_equal]:
        num_equal += 1
    count, end = num_equal * BLOCK, min(len(head.tokens), len(tokens))
    while count < end and head.tokens[count] == tokens[count]:
        count += 1
    return count


def _is_proper_prefix(head: StateHead, tokens: array[int], blocks: list[bytes]) -> bool:
    """Return whether the header's tokens are a prefix of `tokens` and shorter than `tokens`."""
    depth, count = len(head.blocks), len(head.tokens)
    if count >= len(tokens) or head.blocks[depth - 1] != blocks[depth - 1]:
        return False
    return head.tokens[depth * BLOCK :] == tokens[depth * BLOCK : count]


def _names_in(directory: Path) -> list[str]:
    """List a directory without updating its access time.

    Updating the access time would require waiting until the fsync of other files has finished.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_NOATIME", 0))
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _modified_ns(directory: Path) -> int:
    """Return the directory's modification time in nanoseconds, or -1 if the directory doesn't exist."""
    try:
        return directory.stat().st_mtime_ns
    except (OSError, ValueError):  # a null byte in a path is a ValueError
        return -1

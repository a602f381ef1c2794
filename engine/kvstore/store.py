"""Finds, reads and writes one model's KV states in a directory (ADR 014)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from .catalog import StateCatalog
from .directory import StateDirectory
from .reader import OnLoaded, StateReader
from .states import StateMatch, StoreCounters
from .writer import MakeState, SaveQueue, StateWriter

QUEUE_BYTES = 512 << 20
WARM_BYTES = 128 << 20


class StateStore:
    """The states of one identity, in a directory shared with other models and processes. This class is thread-safe.

    Calls don't wait for the disk, except for `flush`, `close`, and a search (`longest`, `context`) after the directory
    has changed. Problems with the directory don't raise exceptions. Instead, reads count as misses, and states that
    can't be written are dropped and counted.
    """

    def __init__(
        self,
        root: Path,
        quota_bytes: int,
        identity: bytes,
        queue_bytes: int = QUEUE_BYTES,
        warm_bytes: int = WARM_BYTES,
    ) -> None:
        """Open the directory and start the reader and writer threads.

        The states that are waiting to be written occupy at most `queue_bytes` of memory, unless a single state is
        larger. Up to `warm_bytes` of memory are prepared for future reads.
        """
        self.directory = StateDirectory(root, quota_bytes)
        self.counters = StoreCounters()
        self._catalog = StateCatalog(self.directory.directory_of(identity), self.counters)
        self._queue = SaveQueue(queue_bytes, self.counters, time.monotonic)
        self._writer = StateWriter(self.directory, self._catalog, self._queue, self.counters, time.monotonic)
        self._reader = StateReader(self.directory, self._catalog, self.counters, warm_bytes, self._writer.note_used)
        self._writer.start()
        self._reader.start()

    # Reading

    def longest(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None:
        """Return the file with the longest usable prefix of the tokens.

        If several files contain the prefix, return the smallest.
        """
        return self._catalog.longest(seed, tokens)

    def context(self, key: str) -> tuple[bytes, array[int]] | None:
        """Return the seed and the tokens of the file with this key, or None if the file doesn't exist.

        The caller must compute the key of these tokens with the seed of its own scope, and compare the result with
        `key`.
        """
        head = self._catalog.get(key)
        return (head.seed, head.tokens) if head else None

    def load(self, match: StateMatch, on_loaded: OnLoaded) -> None:
        """Read and verify a state.

        The reader thread calls `on_loaded` once, with None if the file has no usable state.
        """
        self._reader.load(match, on_loaded)

    @property
    def read_rate(self) -> float:
        """The rate at which states are read and verified, in bytes per second.

        The rate is an estimate until a file has been read.
        """
        return self._reader.rate.per_s

    # Writing

    def offer(self, make: MakeState, expected_saved_s: float, num_bytes: int) -> bool:
        """Queue a state for writing. Return False if the queue doesn't accept the state.

        The writer thread calls `make`. Until then, the state occupies `num_bytes` of memory. `expected_saved_s` is the
        state's expected saving in seconds. A state that is already in the directory is not written again.
        """
        return not self._writer.is_suspended and self._queue.offer(make, expected_saved_s, num_bytes)

    def note_busy(self, busy: bool) -> None:
        """Set whether the engine is computing."""
        self._queue.note_busy(busy)
        self._reader.is_busy = busy

    def note_saved(self, seconds: float) -> None:
        """Record that a load saved the engine `seconds` of computing time. As a result, more states may be written."""
        self._queue.note_saved(seconds)

    @property
    def is_idle(self) -> bool:
        """Whether no states are being written or waiting to be written."""
        return self._queue.is_idle

    def flush(self, deadline: float) -> int:
        """Write the queued states until `deadline` (time.monotonic()), even if the engine is computing.

        Return the number of states that were written.
        """
        return self._queue.flush(deadline)

    # Statistics

    @property
    def warm_bytes(self) -> int:
        """The size in bytes of the memory that has been prepared for future reads."""
        return self._reader.memory.num_bytes

    @property
    def used_bytes(self) -> int:
        """The total size in bytes of all states in the directory, as measured a few seconds ago.

        The states of other models and processes are included.
        """
        return self._writer.used_bytes

    @property
    def quota_bytes(self) -> int:
        """The maximum value of `used_bytes`."""
        return self.directory.quota_bytes

    def close(self) -> None:
        """Drop the queued states, answer pending loads with None, and stop the threads."""
        self._queue.close()
        self._reader.close()
        self._writer.join()

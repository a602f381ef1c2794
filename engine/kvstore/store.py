"""Finds, reads and writes the KV states of one model in a directory (ADR 014)."""

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
    """The states of one identity, in a directory that other models and processes share. Any thread may use it.

    Calls do not wait for the disk, except for `flush`, `close`, and a search (`longest`, `context`) after the directory
    has changed. Problems with the directory raise no exceptions. They cause misses and drops, which are counted.
    """

    def __init__(
        self,
        root: Path,
        quota_bytes: int,
        identity: bytes,
        queue_bytes: int = QUEUE_BYTES,
        warm_bytes: int = WARM_BYTES,
    ) -> None:
        """Open the directory, and start the threads that read and write.

        States that wait to be written occupy at most `queue_bytes` of memory, or one state if that is larger. Up to
        `warm_bytes` of memory are prepared for future reads.
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
        """Return the file with the longest usable prefix of the tokens, and the smallest if several files have it."""
        return self._catalog.longest(seed, tokens)

    def context(self, key: str) -> tuple[bytes, array[int]] | None:
        """Return the seed and the tokens of the file with this key.

        The caller must compute the key of these tokens with the seed of its own scope, and compare it with `key`.
        """
        head = self._catalog.get(key)
        return (head.seed, head.tokens) if head else None

    def load(self, match: StateMatch, on_loaded: OnLoaded) -> None:
        """Read and verify a state. The reading thread calls `on_loaded` once, with None for a miss."""
        self._reader.load(match, on_loaded)

    @property
    def read_rate(self) -> float:
        """The rate in bytes per second at which states are read and verified.

        It is an estimate until a file has been read.
        """
        return self._reader.rate.per_s

    # Writing

    def offer(self, make: MakeState, expected_saved_s: float, num_bytes: int) -> bool:
        """Queue a state. Return False if it is not accepted.

        The writing thread calls `make`. Until then, the state occupies `num_bytes` of memory. `expected_saved_s` is its
        expected saving in seconds. A state that the directory already has is not written.
        """
        return not self._writer.is_suspended and self._queue.offer(make, expected_saved_s, num_bytes)

    def note_busy(self, busy: bool) -> None:
        """Set whether the engine is computing."""
        self._queue.note_busy(busy)
        self._reader.is_busy = busy

    def note_saved(self, seconds: float) -> None:
        """Record that a load saved the engine `seconds` of computing, which allows more writing."""
        self._queue.note_saved(seconds)

    @property
    def is_idle(self) -> bool:
        """Whether no state is waiting to be written or being written."""
        return self._queue.is_idle

    def flush(self, deadline: float) -> int:
        """Write the queued states even if the engine computes, until `deadline` (time.monotonic()).

        Return the number of states written.
        """
        return self._queue.flush(deadline)

    # Statistics

    @property
    def warm_bytes(self) -> int:
        """The size in bytes of the memory that is prepared for future reads."""
        return self._reader.memory.num_bytes

    @property
    def used_bytes(self) -> int:
        """The size in bytes of all states in the directory, including other models and processes, a few seconds ago."""
        return self._writer.used_bytes

    @property
    def quota_bytes(self) -> int:
        """The limit of `used_bytes`."""
        return self.directory.quota_bytes

    def close(self) -> None:
        """Drop waiting states, answer loads with None, and stop the threads."""
        self._queue.close()
        self._reader.close()
        self._writer.join()

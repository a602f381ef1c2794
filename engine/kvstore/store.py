"""The states of one model in a directory: what is there, what is read, what is written (ADR 014)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from .catalog import StateCatalog
from .counters import StoreCounters
from .folder import Folder
from .reader import OnLoaded, StateReader
from .save_queue import MakeState, SaveQueue
from .states import StateMatch
from .writer import StateWriter

QUEUE_BYTES = 512 << 20
WARM_BYTES = 128 << 20


class StateStore:
    """States of one identity in a directory that other models and processes share. Any thread.

    Nothing waits for the disk except `flush`, `close`, and a look at a directory that changed (`longest`, `context`).
    Nothing is raised, whatever the directory is like: it causes misses and drops, which are counted.
    """

    def __init__(
        self,
        root: Path,
        quota_bytes: int,
        identity: bytes,
        queue_bytes: int = QUEUE_BYTES,
        warm_bytes: int = WARM_BYTES,
    ) -> None:
        """`queue_bytes` of memory hold what waits to be written, or one state if that is larger.

        `warm_bytes` of memory wait for the next state to be read.
        """
        self.folder = Folder(root, quota_bytes)
        self.counters = StoreCounters()
        self._catalog = StateCatalog(self.folder.directory_of(identity), self.counters)
        self._queue = SaveQueue(queue_bytes, self.counters, time.monotonic)
        self._writer = StateWriter(self.folder, self._catalog, self._queue, self.counters, time.monotonic)
        self._reader = StateReader(self.folder, self._catalog, self.counters, warm_bytes, self._writer.note_used)
        self._writer.start()
        self._reader.start()

    # Reading

    def longest(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None:
        """Return the file with the longest usable prefix of the tokens, of equally long ones the smallest."""
        return self._catalog.longest(seed, tokens)

    def context(self, key: str) -> tuple[bytes, array[int]] | None:
        """Return seed and tokens of the file of a key. The caller compares the key, computed with a seed of its own."""
        head = self._catalog.get(key)
        return (head.seed, head.tokens) if head else None

    def load(self, match: StateMatch, on_loaded: OnLoaded) -> None:
        """Read and verify a state. The reading thread calls `on_loaded` once, with None for a miss."""
        self._reader.load(match, on_loaded)

    @property
    def read_rate(self) -> float:
        """Bytes/s, with verifying; a guess before the first file."""
        return self._reader.rate.per_s

    # Writing

    def offer(self, make: MakeState, expected_saved_s: float, num_bytes: int) -> bool:
        """Queue a state, which the writing thread makes; return False if it is not taken.

        `expected_saved_s` are the seconds that it may be expected to save. `num_bytes` is the memory that it holds
        until then. What the directory has already is not written.
        """
        return not self._writer.is_off and self._queue.offer(make, expected_saved_s, num_bytes)

    def note_busy(self, busy: bool) -> None:
        """The engine works, or has nothing to do."""
        self._queue.note_busy(busy)
        self._reader.is_busy = busy

    def note_saved(self, seconds: float) -> None:
        """A load saved the engine so many seconds of computing, by its own rates."""
        self._queue.note_saved(seconds)

    @property
    def is_idle(self) -> bool:
        """True if nothing waits to be written, and nothing is being written."""
        return self._queue.is_idle

    def flush(self, deadline: float) -> int:
        """Write what is queued, whatever the engine does, until `deadline` (monotonic); return how many states."""
        return self._queue.flush(deadline)

    # Figures

    @property
    def warm_bytes(self) -> int:
        """Bytes of memory that wait for the next states."""
        return self._reader.memory.num_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all states in the directory, also of other models and processes, as of some seconds ago."""
        return self._writer.used_bytes

    @property
    def quota_bytes(self) -> int:
        """What these may take."""
        return self.folder.quota_bytes

    def close(self) -> None:
        """Drop what waits to be written, answer loads with None, and end the threads."""
        self._queue.close()
        self._reader.close()
        self._writer.join()

"""The tier on disk of one model: what it has, what is read, what is written (ADR 014)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from .catalog import StateCatalog
from .counters import StoreCounters, Tally
from .folder import Folder
from .reader import OnLoaded, StateReader
from .save_queue import Maker, SaveQueue
from .states import KeptState, StateMatch
from .writer import StateWriter

QUEUE_BYTES = 512 << 20
SPARE_BYTES = 128 << 20


class StateStore:
    """States of one identity in a folder that others may share. Any thread.

    Nothing here waits for the disk but `flush`, `close`, and the look at a folder that changed (`longest`, `context`).
    Whatever the folder is like, nothing is raised: there are misses and drops then, which are counted.
    """

    def __init__(
        self,
        folder: Path,
        quota_bytes: int,
        identity: bytes,
        queue_bytes: int = QUEUE_BYTES,
        spare_bytes: int = SPARE_BYTES,
    ) -> None:
        """`queue_bytes`: what may be held in memory to be written, or one state if that is larger.

        `spare_bytes`: memory that waits for the next state to be read. A quota of 0 writes and reads nothing.
        """
        self.folder = Folder(folder, quota_bytes)
        self._tally = Tally()
        self._catalog = StateCatalog(self.folder.directory_of(identity), self._tally)
        self._queue = SaveQueue(queue_bytes, self._tally, time.monotonic)
        self._writer = StateWriter(self.folder, self._catalog, self._queue, self._tally, time.monotonic)
        self._reader = StateReader(self.folder, self._catalog, self._tally, spare_bytes)
        self.is_on = quota_bytes > 0
        if self.is_on:
            self._writer.start()
            self._reader.start()

    # Reading

    def longest(self, seed: bytes, tokens: Sequence[int]) -> StateMatch | None:
        """The file with the longest usable prefix of the tokens, of equals the smallest; from an index in memory."""
        return self._catalog.longest(seed, tokens) if self.is_on else None

    def context(self, key: str) -> tuple[bytes, array[int]] | None:
        """Seed and tokens of the file of that key; whoever asks compares the key, with a seed of their own."""
        head = self._catalog.get(key) if self.is_on else None
        return (head.seed, head.tokens) if head else None

    def load(self, match: StateMatch, on_loaded: OnLoaded) -> None:
        """Reads and verifies it; `on_loaded` is called once, whatever happens, by the thread that reads."""
        if self.is_on:
            self._reader.load(match, on_loaded)
        else:
            on_loaded(None)

    # Writing

    def offer(self, state: KeptState | Maker, worth_s: float, num_bytes: int = 0) -> bool:
        """Queues a state to be written, or what makes it, which the writing thread calls; False if it is not taken.

        `num_bytes`: what a maker holds in memory until then. Not written is what the folder has already.
        """
        if not self.is_on or self._writer.is_off:
            return False
        return self._queue.offer(state, worth_s, state.num_bytes if isinstance(state, KeptState) else num_bytes)

    def note_busy(self, busy: bool) -> None:
        """The engine works: writing has a small share of a core meanwhile; or it has nothing to do."""
        self._queue.note_busy(busy)
        self._reader.note_busy(busy)

    def note_saved(self, seconds: float) -> None:
        """A state that was read saved the engine so much computing, by its own rates."""
        self._queue.note_saved(seconds)

    @property
    def is_idle(self) -> bool:
        """True if nothing waits to be written, nor is written."""
        return self._queue.is_idle

    def flush(self, deadline: float) -> int:
        """Writes what is queued, whatever the engine does, until `deadline` (time.monotonic); how many states were."""
        return self._queue.flush(deadline) if self.is_on else 0

    @property
    def spare_bytes(self) -> int:
        """Of memory that waits for states that will be read."""
        return self._reader.spare.num_bytes

    # How it went

    @property
    def read_rate(self) -> float:
        """Bytes/s, with verifying; a guess before the first file."""
        return self._tally.read_rate

    @property
    def write_rate(self) -> float:
        """Bytes/s, with hashing and fsync; a guess before the first file."""
        return self._tally.write_rate

    @property
    def counters(self) -> StoreCounters:
        """All since the start."""
        return self._tally.snapshot(self.folder.num_evictions)

    @property
    def used_bytes(self) -> int:
        """Of all states in the folder, those of other models and processes included, as of some seconds ago."""
        return self._reader.used_bytes

    @property
    def quota_bytes(self) -> int:
        """What these may take."""
        return self.folder.quota_bytes

    def close(self) -> None:
        """What waits to be written is dropped, loads are answered with None, the threads end."""
        self._queue.close()
        if self.is_on:
            self.is_on = False
            self._writer.join()
            self._reader.close()

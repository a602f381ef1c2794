"""What the store did since it began, and how fast files are read and written."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from .states import Miss

FIRST_GUESS = 400e6  # bytes/s, hashed: a common NVMe disk
GUESS_BYTES = 32 << 20  # the weight of the guess
MEMORY_BYTES = 1 << 30  # what was measured longer ago than that hardly counts


class Drop(StrEnum):
    """Why a state that was offered was not written."""

    QUEUE_FULL = "queue_full"  # worthier ones wait, and memory for those that wait is bounded
    BUSY = "busy"  # it has waited for too long beside a working engine
    QUOTA = "quota"  # the folder is full of what is pinned or being written, or the state is larger than the quota
    KEPT = "kept"  # the folder has it, or a longer one
    OFF = "off"  # the folder can't be written to for now
    ERROR = "error"  # the system refused this one
    INVALID = "invalid"  # no state
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """A snapshot, all since the start."""

    hits: int  # states read, verified and handed over
    misses: Mapping[str, int]  # by reason
    read_bytes: int
    saves: int
    written_bytes: int
    drops: Mapping[str, int]  # by reason
    evictions: int  # for the quota, by this store
    write_errors: int
    outages: int  # times that writing was switched off


class Rate:
    """A running mean of bytes/s. Owned by its tally."""

    def __init__(self) -> None:
        self._bytes, self._seconds = float(GUESS_BYTES), GUESS_BYTES / FIRST_GUESS

    def add(self, num_bytes: int, seconds: float) -> None:
        self._bytes += num_bytes
        self._seconds += max(seconds, 1e-9)
        if self._bytes > MEMORY_BYTES:
            factor = MEMORY_BYTES / 2 / self._bytes
            self._bytes, self._seconds = self._bytes * factor, self._seconds * factor

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._seconds


class Tally:
    """Counts; any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()
        self._read, self._written = Rate(), Rate()

    def hit(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._counts["hits"] += 1
            self._counts["read_bytes"] += num_bytes
            self._read.add(num_bytes, seconds)

    def miss(self, reason: Miss) -> None:
        with self._lock:
            self._misses[reason.value] += 1

    def save(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._counts["saves"] += 1
            self._counts["written_bytes"] += num_bytes
            self._written.add(num_bytes, seconds)

    def drop(self, reason: Drop) -> None:
        with self._lock:
            self._drops[reason.value] += 1

    def count(self, name: str) -> None:
        """One more `write_errors` or `outages`."""
        with self._lock:
            self._counts[name] += 1

    @property
    def read_rate(self) -> float:
        return self._read.bytes_per_s

    @property
    def write_rate(self) -> float:
        return self._written.bytes_per_s

    def snapshot(self, evictions: int) -> StoreCounters:
        with self._lock:
            names = ("hits", "read_bytes", "saves", "written_bytes", "write_errors", "outages")
            counts = {name: self._counts[name] for name in names}
            return StoreCounters(**counts, misses=dict(self._misses), drops=dict(self._drops), evictions=evictions)

"""What the store did since its start."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from .states import Miss


class Drop(StrEnum):
    """Why a state that was offered was not written."""

    QUEUE_FULL = "queue_full"  # states that are worth more wait, and memory for those that wait is bounded
    QUOTA = "quota"  # the directory is full of what is pinned or being written, or the state exceeds the quota
    KEPT = "kept"  # the directory has it, or a longer one
    OFF = "off"  # the directory can't be written to at present
    ERROR = "error"  # the system refused this one
    INVALID = "invalid"  # it has no portable form
    CLOSED = "closed"


@dataclass(slots=True)
class StoreCounters:
    """All since the start. Any thread."""

    hits: int = 0  # states read, verified and handed over
    read_bytes: int = 0
    saves: int = 0
    written_bytes: int = 0
    evictions: int = 0  # files that this store removed for the quota
    write_errors: int = 0
    outages: int = 0  # times that writing was switched off
    # By reason; all reasons are there from the start, so that a dict never changes its size while it is read.
    misses: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(Miss, 0)))
    drops: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(Drop, 0)))
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, name: Literal["write_errors", "outages"]) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)

    def hit(self, num_bytes: int) -> None:
        with self._lock:
            self.hits += 1
            self.read_bytes += num_bytes

    def miss(self, reason: Miss) -> None:
        with self._lock:
            self.misses[reason] += 1

    def save(self, num_bytes: int) -> None:
        with self._lock:
            self.saves += 1
            self.written_bytes += num_bytes

    def drop(self, reason: Drop) -> None:
        with self._lock:
            self.drops[reason] += 1

"""What the store did since its start."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class StoreCounters:
    """All since the start. Any thread."""

    hits: int = 0  # states read, verified and handed over
    misses: int = 0  # files that gave no state
    read_bytes: int = 0
    saves: int = 0
    written_bytes: int = 0
    drops: int = 0  # states that were offered and not written
    evictions: int = 0  # files that this store removed for the quota
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        """Add to counters, by name."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

"""Values of labels that others choose: so many, then `other`."""

from __future__ import annotations

import threading

OTHER = "other"
MOST_VALUES = 100


class Bounded:
    """The first values stay for the life of the process, so that no counter goes down. Any thread."""

    def __init__(self, most: int = MOST_VALUES) -> None:
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self.num_dropped = 0  # how often there was no room for one

    def of(self, value: str) -> str:
        """The value, or OTHER if there were too many others."""
        with self._lock:
            if value not in self._known and len(self._known) >= self._most:
                self.num_dropped += 1
                return OTHER
            self._known.add(value)
            return value

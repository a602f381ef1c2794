"""Memory that the system has provided before a state is read into it.

On a virtual machine whose host provides memory when it is first touched, that takes up to 20 times as long as reading
40 MB from the page cache (ADR 014).
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable

STEP_BYTES = 1 << 18  # touched at once: far less than 1 ms where the host has the memory
MAX_PIECES = 4  # for the states of some requests that come together
MAX_SLACK = 4  # a piece is used for a state that takes at least a quarter of it: the rest goes back to the system


def new_memory(num_bytes: int) -> mmap.mmap:
    """Return memory that is not cleared by Python: clearing a `bytearray` of 1 GB holds Python's lock for 0.3 s."""
    data = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            data.madvise(mmap.MADV_HUGEPAGE)
    return data


class WarmMemory:
    """Pieces of memory, each as large as the largest state so far. One thread; any thread may ask `num_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        """All pieces together have at most `max_bytes`; 0 keeps none. Only Linux can give back a part of a piece."""
        self._max_bytes = max_bytes if sys.platform == "linux" else 0
        self._piece_bytes = 0
        self._pieces: list[mmap.mmap] = []
        self._unfinished: mmap.mmap | None = None
        self._touched = 0  # bytes of the unfinished piece that the system has provided

    @property
    def num_bytes(self) -> int:
        return self._touched + sum(map(len, list(self._pieces)))

    @property
    def is_lacking(self) -> bool:
        """True if there are fewer pieces than there may be."""
        num_pieces = len(self._pieces)
        return 0 < self._piece_bytes * (num_pieces + 1) <= self._max_bytes and num_pieces < MAX_PIECES

    def expect(self, num_bytes: int) -> None:
        """A state may have so many bytes."""
        if self._piece_bytes < num_bytes <= self._max_bytes:
            self._piece_bytes, self._pieces = num_bytes, []
            self._unfinished, self._touched = None, 0

    def take(self, num_bytes: int) -> mmap.mmap:
        """Return memory of this size: a piece, if there is one that fits well."""
        self.expect(num_bytes)
        if not self._pieces or not num_bytes <= self._piece_bytes <= MAX_SLACK * num_bytes:
            return new_memory(num_bytes)
        piece = self._pieces.pop()
        piece.resize(num_bytes)
        return piece

    def add_piece(self, must_stop: Callable[[], bool]) -> None:
        """Provide one more piece, until `must_stop` returns True; the next call continues with the same piece."""
        piece = self._unfinished = self._unfinished or new_memory(self._piece_bytes)
        with open("/dev/zero", "rb", buffering=0) as zeros:  # reading leaves Python's lock to other threads
            while self._touched < len(piece):
                if must_stop():
                    return
                self._touched += zeros.readinto(memoryview(piece)[self._touched : self._touched + STEP_BYTES])
        self._pieces.append(piece)
        self._unfinished, self._touched = None, 0

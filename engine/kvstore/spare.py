"""Memory that the next states are read into: what a system gives for the first time takes longer than the read."""

from __future__ import annotations

import contextlib
import mmap
import sys

STEP_BYTES = 1 << 18  # touched between two looks for something better to do
MOST_PIECES = 4
SLACK = 4  # times as large as a state as a piece may be
_CAN_GIVE_BACK = sys.platform == "linux"  # what is too much of it: mremap


def new_memory(num_bytes: int) -> mmap.mmap:
    """Python clears a `bytearray` under its lock, 0.3 s for 1 GB; this no other thread waits for."""
    data = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            data.madvise(mmap.MADV_HUGEPAGE)
    return data


class Spare:
    """Pieces of memory that the system has given already, each about as large as the largest state of late.

    One thread, but for `num_bytes` and `is_lacking`, which any may ask.
    """

    def __init__(self, most_bytes: int) -> None:
        """All together have at most so many bytes; 0 for none."""
        self._most_bytes = most_bytes if _CAN_GIVE_BACK else 0
        self._size = 0  # of a piece
        self._pieces: list[mmap.mmap] = []
        self._new: mmap.mmap | None = None  # of which so many bytes are touched:
        self._touched = 0

    @property
    def num_bytes(self) -> int:
        """What waits."""
        return sum(map(len, self._pieces)) + self._touched

    @property
    def is_lacking(self) -> bool:
        """True if there are fewer pieces than there may be."""
        return 0 < self._size <= self._most_bytes - sum(map(len, self._pieces)) and len(self._pieces) < MOST_PIECES

    def expect(self, num_bytes: int) -> None:
        """A state may be so large."""
        if self._size < num_bytes <= self._most_bytes:
            self._size, self._pieces, self._new, self._touched = num_bytes, [], None, 0

    def take(self, num_bytes: int) -> mmap.mmap:
        """Memory for a state: a piece, unless that is too small, or far too large."""
        self.expect(num_bytes)
        if not self._pieces or not num_bytes <= self._size <= SLACK * num_bytes:
            self._forget_some(num_bytes)
            return new_memory(num_bytes)
        piece = self._pieces.pop()
        piece.resize(num_bytes)  # the system has the rest again
        return piece

    def _forget_some(self, num_bytes: int) -> None:
        """States are smaller than the pieces: after some of them the next pieces are, too."""
        if SLACK * num_bytes < self._size:
            self._size -= self._size // 8
            self._pieces, self._new, self._touched = self._pieces[1:], None, 0

    def touch_more(self) -> bool:
        """Takes a step towards the next piece; False if there are enough."""
        if not self.is_lacking:
            return False
        self._new = self._new or new_memory(self._size)
        with open("/dev/zero", "rb", buffering=0) as zeros:  # without Python's lock
            self._touched += zeros.readinto(memoryview(self._new)[self._touched : self._touched + STEP_BYTES])
        if self._touched == self._size:
            self._pieces.append(self._new)
            self._new, self._touched = None, 0
        return True

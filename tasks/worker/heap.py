"""The heap of the C library, told to give back what a large job leaves behind. A no-op where it is not glibc's."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

log = logging.getLogger(__name__)

# malloc.h: mallopt. By default glibc raises both thresholds, up to 32 and 64 MB, as large blocks are freed, and then
# keeps so much at the end of the heap of every thread that ever had a large job.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
KEPT_BYTES = 8 << 20  # free at the end of a heap; with less, each token of a large vocabulary would pay for fresh pages
MAPPED_BYTES = 4 << 20  # a larger block is the system's own again as soon as it is freed
NUM_HEAPS = 4  # shared by all threads: most of them wait, or have the GIL and Python's own heap


def bound_free_heap(libc: Any = None) -> bool:
    """From now on little of what is freed stays with this process; False where the C library can't do that."""
    libc = libc or ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return False
    options = ((_TRIM_THRESHOLD, KEPT_BYTES), (_MMAP_THRESHOLD, MAPPED_BYTES), (_ARENA_MAX, NUM_HEAPS))
    refused = [option for option, value in options if not libc.mallopt(option, value)]
    if refused:
        log.warning("the C library refuses the options %s of mallopt: it keeps more free memory than it could", refused)
    return not refused


def trim_heap(libc: Any = None) -> None:
    """What is free between blocks in use belongs to the system again: some milliseconds, in which others allocate
    nothing. Another C library than glibc does that by itself, or not at all."""
    libc = libc or ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)

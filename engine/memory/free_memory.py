"""The RAM available to this process: the machine's free RAM, or less if a container has a lower limit."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from pathlib import Path

import psutil

from cellama.engine.system.processors import CGROUPS, OWN, control_groups, text_of

_LIMIT_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # v2, v1
_FILE_PAGES = (("total_inactive_file", "total_active_file"), ("inactive_file", "active_file"))  # memory.stat: v1, v2
_NO_LIMIT = 1 << 60  # v1 reports a number near 2**63 if there is no limit


def ram() -> tuple[int, int]:
    """Return the total and free RAM in bytes.

    The page cache counts as free, because the operating system drops it on demand.
    """
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    limit = group_limit()
    return (total, free) if limit is None else (min(total, limit[0]), min(free, limit[1]))


def group_limit(root: Path = CGROUPS, own: Path = OWN) -> tuple[int, int] | None:
    """Return the RAM limit of this process's control groups (v1 or v2) and the free bytes.

    Return None if the control groups have no limit.
    """
    found = [limit for folder in control_groups("memory", root, own) if (limit := _limit(folder)) is not None]
    return (min(limit for limit, _ in found), min(free for _, free in found)) if found else None


def _limit(folder: Path) -> tuple[int, int] | None:
    for limit_name, usage_name in _LIMIT_FILES:
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            return limit, max(0, limit - usage + _page_cache(folder / "memory.stat"))
    return None


def _number(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text is not None and text.isdigit() else None


def _page_cache(path: Path) -> int:
    try:
        stat = dict(line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return 0
    return next((int(stat[one]) + int(stat[other]) for one, other in _FILE_PAGES if one in stat and other in stat), 0)


def give_memory_back() -> None:
    """Collect reference cycles, and make glibc return freed pages to the operating system."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # musl has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)

"""Processes of our own that do what must not happen in a process that serves: limits on what they may take."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path


def confine(pid: int, *, data_bytes: int, cpu_s: int | None = None) -> None:
    """Limits a child's memory and CPU time, and makes it the first to go when memory runs out. Elsewhere than on Linux
    it does nothing: there its time is all that is limited, by its parent."""
    if sys.platform != "linux":
        return
    import resource

    limits = {resource.RLIMIT_DATA: data_bytes, resource.RLIMIT_CORE: 0}
    if cpu_s is not None:
        limits[resource.RLIMIT_CPU] = cpu_s
    with contextlib.suppress(OSError, ValueError):  # it is gone already, or has lower limits
        for limit, value in limits.items():
            resource.prlimit(pid, limit, (value, value))
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000", encoding="ascii")


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"

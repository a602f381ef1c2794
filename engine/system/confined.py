"""Resource limits for child processes whose work could otherwise crash or overload a serving process."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path


def confine(pid: int, *, data_bytes: int, cpu_s: int | None = None) -> None:
    """Limit a child process's memory and CPU time, and make it the first process to be killed if memory runs out.

    These limits work only on Linux. On other systems, only the running time is limited, by the parent process.
    """
    if sys.platform != "linux":
        return
    import resource

    limits = {resource.RLIMIT_DATA: data_bytes, resource.RLIMIT_CORE: 0}
    if cpu_s is not None:
        limits[resource.RLIMIT_CPU] = cpu_s
    with contextlib.suppress(OSError, ValueError):  # the child has exited, or has lower limits
        for limit, value in limits.items():
            resource.prlimit(pid, limit, (value, value))
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000", encoding="ascii")


def describe_exit(code: int) -> str:
    """Return a readable description of an exit code."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"

"""The CPUs available to this process, the limits of the process's container, and the machine's CPU times."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # Linux control groups, v1 and v2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOW_PRIORITY_COST = 0.2  # effect of a niced program on the steps of an engine, at nice 10 (docs/adr/007-threads.md)


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors available to a process."""

    cores: int  # number of processors on which it may run
    quota: float | None = None  # CPU seconds per second that its container allows

    @property
    def available(self) -> int:
        """The number of threads that can run at the same time."""
        return self.cores if self.quota is None else max(1, min(self.cores, int(self.quota)))


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Total CPU times in seconds of this process, and of all programs on its processors."""

    busy_s: float
    own_s: float


def own_processors() -> list[int]:
    """Return the numbers of the processors on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def own_limits() -> Processors:
    """Return the processors of this process and the quota of its container."""
    return Processors(len(own_processors()), cpu_quota())


def available_cores() -> int:
    """Return the number of threads that this process can run at the same time."""
    return own_limits().available


def cpu_quota(root: Path = CGROUPS, own: Path = OWN) -> float | None:
    """Return the CPU quota of this process's control groups, in seconds of CPU time per second.

    Return None if the control groups have no limit.
    """
    found = [quota for folder in control_groups("cpu", root, own) if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def _quota(folder: Path) -> float | None:
    words = (text_of(folder / "cpu.max") or "").split()  # v2: "200000 100000", or "max 100000"
    if not words:
        words = [text_of(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]  # v1: -1 = no limit
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return None


def machine_id() -> str:
    """Return the boot id, or the host name if the system has no boot id.

    All containers on a Linux machine share the same boot id.
    """
    return text_of(_BOOT_ID) or socket.gethostname()


def read() -> ProcessorTimes | None:
    """Return the current CPU times, or None if the system doesn't report them."""
    try:
        times = psutil.cpu_times(percpu=True)
    except (OSError, RuntimeError):
        return None
    ours = own_processors()
    if ours and ours[-1] < len(times):  # otherwise some processors are offline, and the numbers don't match
        times = [times[number] for number in ours]
    busy_s = sum(_busy_s(one) for one in times)
    return ProcessorTimes(busy_s, time.process_time())


def _busy_s(times: object) -> float:
    """Return the time for which a processor was busy. Guest time is already included in the user time."""
    kinds = ("user", "system", "irq", "softirq")
    return sum(getattr(times, kind, 0.0) for kind in kinds) + LOW_PRIORITY_COST * getattr(times, "nice", 0.0)


def control_groups(controller: str, root: Path = CGROUPS, own: Path = OWN) -> list[Path]:
    """Return the control groups with this controller to which this process belongs, from the innermost to the root."""
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    found: dict[Path, None] = {}
    for _, controllers, path in lines:
        if controllers == "" or controller in controllers.split(","):
            base = root / controller if controllers else root
            inner = base / path.lstrip("/")
            around = [folder for folder in inner.parents if folder.is_relative_to(base)]
            found |= dict.fromkeys([inner, *around])
    return list(found)


def text_of(path: Path) -> str | None:
    """Return the contents of a control group's file, or None if the file can't be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None

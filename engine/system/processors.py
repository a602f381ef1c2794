"""The processors that this process may use, and how busy they are: the system's figures."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from .control_groups import CGROUPS, OWN, folders, text_of
from .cores import Place

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOW_PRIORITY_COST = 0.2  # what time of niced programs does to our steps, measured at nice 10 (docs/adr/007-threads.md)


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds of processor time until now: of all programs on our processors, and of this process."""

    busy_s: float
    own_s: float


def own_processors() -> list[int]:
    """The numbers of the processors on which the system may run this process."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def place() -> Place:
    """Where this process computes."""
    return Place(len(own_processors()), cpu_quota())


def available_cores() -> int:
    """Threads of this process that can run at the same time."""
    return place().available


def cpu_quota(root: Path = CGROUPS, own: Path = OWN) -> float | None:
    """The processors' time that the limits of this process's control groups allow per second; None without one."""
    found = [quota for folder in folders("cpu", root, own) if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def _quota(folder: Path) -> float | None:
    words = (text_of(folder / "cpu.max") or "").split()  # v2: "200000 100000", or "max 100000"
    if not words:
        words = [text_of(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]  # v1: -1 = no limit
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return None


def machine_id() -> str:
    """The same for all processes on one running system, also in its containers (Linux); else the host's name."""
    return text_of(_BOOT_ID) or socket.gethostname()


def read() -> Reading | None:
    """What was used until now; None where the system does not tell."""
    try:
        times = psutil.cpu_times(percpu=True)
    except (OSError, RuntimeError):
        return None
    ours = own_processors()
    if ours and ours[-1] < len(times):  # else some are switched off, and the numbers don't fit
        times = [times[number] for number in ours]
    busy_s = sum(_busy_s(one) for one in times)
    return Reading(busy_s, time.process_time())


def _busy_s(times: object) -> float:
    """Of one processor. Time of guests is part of the user's."""
    kinds = ("user", "system", "irq", "softirq")
    return sum(getattr(times, kind, 0.0) for kind in kinds) + LOW_PRIORITY_COST * getattr(times, "nice", 0.0)

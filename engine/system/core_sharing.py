"""Core sharing: divide a machine's cores among workers and their models, allowing for other programs.

llama.cpp's threads wait for each other many times per token. A thread without a core delays all other threads, so each
thread should have its own core (docs/adr/007-threads.md contains measurements). All functions are pure. `CoreSharing`
owns the thread that observes the machine.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cellama.config.logging import event_logger

from . import processors
from .processors import Processors, ProcessorTimes

log = event_logger(__name__)

ACTIVE = 0.2  # cores; a peer that uses less leaves its share to the others
FALL_S = 1.0  # seconds that a lower demand must last: a thread without a core slows down every step
RAISE_S = 5.0  # seconds that a higher demand must last: an unused core costs little
# Tolerated use by other programs in cores: the larger of LEAST_TOLERATED and TOLERATED / cores.
LEAST_TOLERATED, TOLERATED = 0.1, 0.7
LOOK_S = 0.5  # seconds between two observations: at least two within FALL_S
IN_USE_S = 1.0  # seconds after its last request for which a part counts as in use
WARN_S = 10.0  # seconds for which other programs must use cores before a warning is logged
USE_WEIGHT = 0.5  # weight of the newest value in the running mean of the cores that this process uses


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker on the same machine."""

    wants: int  # threads that it would use alone
    uses: float  # cores that it has recently used
    same_quota: bool = False  # it is in the same container
    goes_first: bool = False  # it gets the larger part of a number of cores that can't be divided equally


def fair_shares(total: int, wants: Sequence[int]) -> list[int]:
    """Divide cores among processes that request these numbers of cores. Each process gets at least one core.

    No process gets more cores than it requests, and the other processes share the rest. If the cores can't be divided
    equally, the first processes get the larger shares.
    """
    shares, remaining = [0] * len(wants), total
    modest_first = sorted(range(len(wants)), key=lambda index: (wants[index], -index))
    for num_served, index in enumerate(modest_first):
        shares[index] = max(1, min(wants[index], remaining // (len(wants) - num_served)))
        remaining -= shares[index]
    return shares


def available_beyond_others(cores: int, others: float) -> int:
    """Return the number of remaining cores, at least 1, if other programs use `others` cores.

    Light use is ignored, because on a machine with few cores, leaving a core unused costs more than sharing it with a
    program that runs only occasionally.
    """
    lost = math.ceil(others - max(LEAST_TOLERATED, TOLERATED / cores))
    return max(1, cores - max(0, lost))


def num_threads(local: Processors, peers: Sequence[Peer], others: float) -> int:
    """Return the number of threads that a process with these peers should use if other programs use `others` cores."""
    active = [peer for peer in peers if peer.uses >= ACTIVE]
    share = _share(available_beyond_others(local.cores, others), local.available, active)
    if local.available < local.cores:
        same_container = [peer for peer in active if peer.same_quota]
        share = min(share, _share(local.available, local.available, same_container))
    return share


def _share(total: int, wants: int, peers: Sequence[Peer]) -> int:
    before = [peer.wants for peer in peers if peer.goes_first]
    after = [peer.wants for peer in peers if not peer.goes_first]
    return fair_shares(total, [*before, wants, *after])[len(before)]


def others_of(busy: float, local: float, peers: Sequence[Peer]) -> float:
    """Return the number of cores used by programs other than this process and its active peers."""
    return max(0.0, busy - local - sum(peer.uses for peer in peers if peer.uses >= ACTIVE))


class SteadyThreads:
    """A number of threads that changes only if demand changes for some time.

    The number falls after one second of lower demand, and rises only after a longer period of higher demand.
    """

    def __init__(self, current: int) -> None:
        self.current = current
        self._calls: deque[tuple[float, int]] = deque()  # (time, threads) of the last RAISE_S
        self._since: float | None = None

    def follow(self, now: float, called_for: int) -> int:
        """Record the number of threads that are needed now, and return the number of threads to use."""
        self._since = now if self._since is None else self._since
        self._calls.append((now, called_for))
        while self._calls[0][0] < now - RAISE_S:
            self._calls.popleft()
        lower = max(count for at, count in self._calls if at >= now - FALL_S)
        if now - self._since >= FALL_S:
            self.current = min(self.current, lower)
        if now - self._since >= RAISE_S:
            self.current = max(self.current, min(count for _, count in self._calls))
        return self.current


class Threaded(Protocol):
    """An engine or embedder whose number of threads can be set."""

    @property
    def last_submit(self) -> float: ...  # Unix seconds

    @property
    def is_busy(self) -> bool: ...

    def use_threads(self, count: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Claim:
    """An engine or embedder, and the number of threads that it would use if no other program used the machine.

    `fixed` is true if the user has set the number of threads.
    """

    part: Threaded
    threads: int
    fixed: bool = False

    @property
    def in_use(self) -> bool:
        return self.part.is_busy or time.time() - self.part.last_submit < IN_USE_S


class CoreSharing:
    """Owns a thread that observes the machine twice per second and sets each part's number of threads."""

    def __init__(self, claims: Callable[[], Sequence[Claim]], own: Processors | None = None) -> None:
        """Share cores among the parts returned by `claims`.

        `own` describes the processors available to this process. By default, the processors are detected.
        """
        self._claims = claims
        self._processors = own or processors.own_limits()
        self._peers: Sequence[Peer] = ()
        self._last: tuple[float, ProcessorTimes] | None = None
        self._uses = 0.0
        self._wants = 1
        self._threads = SteadyThreads(self._processors.available)
        self._quiet_at: float | None = None  # last time at which other programs left all cores to cellama
        self._has_warned = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cellama-cores", daemon=True)

    def start(self) -> None:
        """Start observing the machine."""
        self._thread.start()

    def close(self) -> None:
        """Stop observing the machine. The parts keep their current numbers of threads."""
        self._closing.set()
        self._thread.join()

    def meet(self, peers: Sequence[Peer]) -> None:
        """Set the other workers that run on this machine."""
        self._peers = peers

    def report(self) -> dict[str, Any]:
        """Return a description of this process for other workers, as JSON data."""
        machine = {"machine": processors.machine_id(), "processors": processors.own_processors()}
        return {**machine, "wants": self._wants, "uses": round(self._uses, 2), "threads": self._threads.current}

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self.look(time.monotonic(), processors.read())
            except Exception:
                log.exception("core sharing failed", detail="core sharing will be retried at the next observation")

    def look(self, now: float, reading: ProcessorTimes | None) -> None:
        """Compare the CPU times with the previous observation, and set each part's number of threads."""
        others = self._others(now, reading)
        claims = self._claims()
        in_use = [claim for claim in claims if claim.in_use]
        self._wants = min(self._processors.available, max(1, sum(claim.threads for claim in in_use or claims)))
        share = self._threads.follow(now, num_threads(self._processors, self._peers, others))
        for claim in claims:
            if not claim.fixed:
                claim.part.use_threads(_threads_of(claim, claims, in_use, share))
        self._warn_about_others(others, now, share)

    def _others(self, now: float, reading: ProcessorTimes | None) -> float:
        """Return the number of cores recently used by programs other than this process and its peers."""
        last, self._last = self._last, None if reading is None else (now, reading)
        if last is None or reading is None or now <= last[0]:
            return 0.0
        seconds = now - last[0]
        used = (reading.own_s - last[1].own_s) / seconds
        self._uses += USE_WEIGHT * (used - self._uses)
        return others_of((reading.busy_s - last[1].busy_s) / seconds, used, self._peers)

    def _warn_about_others(self, others: float, now: float, share: int) -> None:
        """Log once that other programs are using cores, because this may explain why a worker is slow."""
        cores = self._processors.cores
        if self._quiet_at is None or available_beyond_others(cores, others) == cores:
            self._quiet_at = now
        elif not self._has_warned and now - self._quiet_at >= WARN_S and share < self._wants:
            self._has_warned = True
            log.warning(
                "load from other programs detected",
                used=round(others, 1),
                cores=cores,
                threads=share,
                wanted=self._wants,
                detail="models use fewer threads; stop these programs, or set the models' `threads`",
            )


def _threads_of(claim: Claim, claims: Sequence[Claim], in_use: Sequence[Claim], share: int) -> int:
    """Return the number of threads for the claim's part.

    The part shares the process's threads with all parts in use.
    """
    num_fixed = sum(other.threads for other in in_use if other.fixed)
    sharing = [other for other in claims if not other.fixed and (other in in_use or other is claim)]
    shares = fair_shares(max(1, share - num_fixed), [other.threads for other in sharing])
    return shares[sharing.index(claim)]

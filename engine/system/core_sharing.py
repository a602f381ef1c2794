"""Shares the cores of a machine out: among workers, among the models of one worker, alongside other programs.

llama.cpp's threads wait for each other many times per token. A thread that does not run holds up all others, so each
must have a core to itself (docs/adr/007-threads.md has the figures). The functions are pure; `CoreSharing` owns the
thread that looks at the machine.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from . import processors
from .processors import Processors, ProcessorTimes

log = logging.getLogger(__name__)

ACTIVE = 0.2  # cores: a peer that uses less leaves its share to the others
FALL_S = 1.0  # seconds for which fewer threads must be called for: a thread without a core slows every step down …
RAISE_S = 5.0  # … and seconds for more, because a core too few costs little
LEAST_TOLERATED, TOLERATED = 0.1, 0.7  # cores; the second one over the number of cores
LOOK_S = 0.5  # seconds between two looks at the machine: at least two within FALL_S
IN_USE_S = 1.0  # seconds after its last request for which a part counts as in use
WARN_S = 10.0  # other programs that take cores for so long are worth a line in the log
USE_WEIGHT = 0.5  # of the newest value in the running mean of what this process uses


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker on the same machine."""

    wants: int  # threads, if it were alone
    uses: float  # cores, lately
    same_quota: bool = False  # it lives in the same container
    goes_first: bool = False  # where a number of cores can't be divided


def fair_shares(total: int, wants: Sequence[int]) -> list[int]:
    """Cores for each, at least 1: none gets more than it wants, the others share what that leaves.

    What can't be divided goes to those named first.
    """
    shares, left = [0] * len(wants), total
    modest_first = sorted(range(len(wants)), key=lambda index: (wants[index], -index))
    for num_served, index in enumerate(modest_first):
        shares[index] = max(1, min(wants[index], left // (len(wants) - num_served)))
        left -= shares[index]
    return shares


def cores_beside(cores: int, others: float) -> int:
    """The cores that are left beside programs that use `others` of them, at least 1.

    A little is tolerated: on few cores one less costs more than a program that runs now and then.
    """
    lost = math.ceil(others - max(LEAST_TOLERATED, TOLERATED / cores))
    return max(1, cores - max(0, lost))


def threads_beside(own: Processors, peers: Sequence[Peer], others: float) -> int:
    """The threads that a process with `own` may have beside its peers and `others` cores of other programs."""
    active = [peer for peer in peers if peer.uses >= ACTIVE]
    share = _own_share(cores_beside(own.cores, others), own.available, active)
    if own.available < own.cores:
        own_container = [peer for peer in active if peer.same_quota]
        share = min(share, _own_share(own.available, own.available, own_container))
    return share


def _own_share(total: int, wants: int, peers: Sequence[Peer]) -> int:
    before = [peer.wants for peer in peers if peer.goes_first]
    after = [peer.wants for peer in peers if not peer.goes_first]
    return fair_shares(total, [*before, wants, *after])[len(before)]


def others_of(busy: float, own: float, peers: Sequence[Peer]) -> float:
    """The cores that are used by others than this process and its active peers."""
    return max(0.0, busy - own - sum(peer.uses for peer in peers if peer.uses >= ACTIVE))


class Steady:
    """A number of threads that follows what is called for: down within a second, up when it lasts."""

    def __init__(self, current: int) -> None:
        self.current = current
        self._calls: deque[tuple[float, int]] = deque()  # time, threads; of the last RAISE_S
        self._since: float | None = None

    def follow(self, now: float, called_for: int) -> int:
        """The number from now on."""
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
    """An engine or an embedder."""

    @property
    def last_submit(self) -> float: ...  # unix seconds

    @property
    def is_busy(self) -> bool: ...

    def use_threads(self, count: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Claim:
    """What computes, and its threads if it were alone; `fixed` if they were set, so that they stay."""

    part: Threaded
    threads: int
    fixed: bool = False

    @property
    def in_use(self) -> bool:
        return self.part.is_busy or time.time() - self.part.last_submit < IN_USE_S


class CoreSharing:
    """Owns a thread that looks at the machine twice a second and tells the parts how many threads they have."""

    def __init__(self, claims: Callable[[], Sequence[Claim]], own: Processors | None = None) -> None:
        """`claims` returns the current claims. `own` is what this process may compute on; None: as the system says."""
        self._claims = claims
        self._own = own or processors.own_limits()
        self._peers: Sequence[Peer] = ()
        self._last: tuple[float, ProcessorTimes] | None = None
        self._uses = 0.0
        self._wants = 1
        self._steady = Steady(self._own.available)
        self._quiet_at: float | None = None  # when other programs last left all cores to us and our peers
        self._warned = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cellama-cores", daemon=True)

    def start(self) -> None:
        """Looks from now on, in a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """Looks no more; the parts keep the threads that they have."""
        self._closing.set()
        self._thread.join()

    def meet(self, peers: Sequence[Peer]) -> None:
        """These are the other workers of this machine, from now on."""
        self._peers = peers

    def report(self) -> dict[str, Any]:
        """What other workers need to know of this process, in JSON."""
        own = {"machine": processors.machine_id(), "processors": processors.own_processors()}
        return {**own, "wants": self._wants, "uses": round(self._uses, 2), "threads": self._steady.current}

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            try:
                self.look(time.monotonic(), processors.read())
            except Exception:
                log.exception("the cores could not be shared out; it is tried again")

    def look(self, now: float, reading: ProcessorTimes | None) -> None:
        """Compares what the machine has done with the last look, and tells the parts their threads."""
        others = self._others(now, reading)
        claims = self._claims()
        in_use = [claim for claim in claims if claim.in_use]
        self._wants = min(self._own.available, max(1, sum(claim.threads for claim in in_use or claims)))
        share = self._steady.follow(now, threads_beside(self._own, self._peers, others))
        for claim in claims:
            if not claim.fixed:
                claim.part.use_threads(_threads_of(claim, claims, in_use, share))
        self._warn_of(others, now, share)

    def _others(self, now: float, reading: ProcessorTimes | None) -> float:
        """Cores that other programs than we and our peers used since the last look."""
        last, self._last = self._last, None if reading is None else (now, reading)
        if last is None or reading is None or now <= last[0]:
            return 0.0
        seconds = now - last[0]
        own = (reading.own_s - last[1].own_s) / seconds
        self._uses += USE_WEIGHT * (own - self._uses)
        return others_of((reading.busy_s - last[1].busy_s) / seconds, own, self._peers)

    def _warn_of(self, others: float, now: float, share: int) -> None:
        """Says once that other programs take cores from us: it may be what a slow worker suffers from."""
        if self._quiet_at is None or cores_beside(self._own.cores, others) == self._own.cores:
            self._quiet_at = now
        elif not self._warned and now - self._quiet_at >= WARN_S and share < self._wants:
            self._warned = True
            log.warning(
                "other programs use %.1f of %d cores: models compute with %d threads instead of %d while that lasts; "
                "end the others, or set a model's threads, which then stay as they are",
                others,
                self._own.cores,
                share,
                self._wants,
            )


def _threads_of(claim: Claim, claims: Sequence[Claim], in_use: Sequence[Claim], share: int) -> int:
    """Its part of this process's share, beside those that are in use, as if it were, too."""
    chosen = sum(other.threads for other in in_use if other.fixed)
    sharing = [other for other in claims if not other.fixed and (other in in_use or other is claim)]
    shares = fair_shares(max(1, share - chosen), [other.threads for other in sharing])
    return shares[sharing.index(claim)]

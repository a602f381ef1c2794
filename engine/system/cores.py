"""How the cores of a machine are shared out (pure): among workers, among the models of one, beside other programs.

llama.cpp's threads wait for each other many times per token. One that does not run holds up all others, so each must
have a core to itself (docs/adr/007-threads.md has the figures).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

ACTIVE = 0.2  # cores: a peer that uses less leaves its share to the others
FALL_S = 1.0  # so long must fewer threads be called for …
RAISE_S = 5.0  # … and so long more
LEAST_TOLERATED, TOLERATED = 0.1, 0.7  # cores; the second one over the number of cores


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker on the same machine."""

    wants: int  # threads, if it were alone
    uses: float  # cores, lately
    same_quota: bool = False  # it lives in the same container
    goes_first: bool = False  # where a number of cores can't be divided


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process computes."""

    cores: int  # processors it may run on
    quota: float | None = None  # processors' time per second that its container allows

    @property
    def available(self) -> int:
        """Threads that can run at the same time."""
        return self.cores if self.quota is None else max(1, min(self.cores, int(self.quota)))


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


def threads_beside(place: Place, peers: Sequence[Peer], others: float) -> int:
    """The threads that a process of `place` may have beside its peers and `others` cores of other programs."""
    active = [peer for peer in peers if peer.uses >= ACTIVE]
    share = _own_share(cores_beside(place.cores, others), place.available, active)
    if place.available < place.cores:
        own_container = [peer for peer in active if peer.same_quota]
        share = min(share, _own_share(place.available, place.available, own_container))
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

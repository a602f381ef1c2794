"""Gives the engines of this process their threads: cores.py decides, processors.py knows how busy the machine is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from . import processors
from .cores import Peer, Place, Steady, cores_beside, fair_shares, others_of, threads_beside
from .processors import Reading

log = logging.getLogger(__name__)

LOOK_S = 0.5
IN_USE_S = 1.0  # after its last request a part counts as in use
WARN_S = 10.0  # other programs that take cores for so long are worth a line in the log
USE_WEIGHT = 0.5  # of the newest value in the running mean of what this process uses


class Part(Protocol):
    """An engine or an embedder."""

    @property
    def last_submit(self) -> float: ...  # unix seconds

    @property
    def is_busy(self) -> bool: ...

    def use_threads(self, count: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Claim:
    """What computes, and its threads if it were alone; `fixed` if they were set, so that they stay."""

    part: Part
    threads: int
    fixed: bool = False

    @property
    def in_use(self) -> bool:
        return self.part.is_busy or time.time() - self.part.last_submit < IN_USE_S


class CoreSharing:
    """Owns a thread that looks at the machine twice a second and tells the parts how many threads they have."""

    def __init__(self, claims: Callable[[], Sequence[Claim]], place: Place | None = None) -> None:
        """`claims` gives those of the moment; `place` is where this process runs, if it is not to be found out."""
        self._claims = claims
        self._place = place or processors.place()
        self._peers: Sequence[Peer] = ()
        self._last: tuple[float, Reading] | None = None
        self._uses = 0.0
        self._wants = 1
        self._steady = Steady(self._place.available)
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

    def look(self, now: float, reading: Reading | None) -> None:
        """Compares what the machine has done with the last look, and tells the parts their threads."""
        others = self._others(now, reading)
        claims = self._claims()
        in_use = [claim for claim in claims if claim.in_use]
        self._wants = min(self._place.available, max(1, sum(claim.threads for claim in in_use or claims)))
        share = self._steady.follow(now, threads_beside(self._place, self._peers, others))
        for claim in claims:
            if not claim.fixed:
                claim.part.use_threads(_threads_of(claim, claims, in_use, share))
        self._warn_of(others, now, share)

    def _others(self, now: float, reading: Reading | None) -> float:
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
        if self._quiet_at is None or cores_beside(self._place.cores, others) == self._place.cores:
            self._quiet_at = now
        elif not self._warned and now - self._quiet_at >= WARN_S and share < self._wants:
            self._warned = True
            log.warning(
                "other programs use %.1f of %d cores: models compute with %d threads instead of %d while that lasts; "
                "end the others, or set a model's threads, which then stay as they are",
                others,
                self._place.cores,
                share,
                self._wants,
            )


def _threads_of(claim: Claim, claims: Sequence[Claim], in_use: Sequence[Claim], share: int) -> int:
    """Its part of this process's share, beside those that are in use, as if it were, too."""
    chosen = sum(other.threads for other in in_use if other.fixed)
    sharing = [other for other in claims if not other.fixed and (other in in_use or other is claim)]
    shares = fair_shares(max(1, share - chosen), [other.threads for other in sharing])
    return shares[sharing.index(claim)]

"""Which state is written next, and when: the policy of the writing thread (ADR 014).

- States wait in memory, and the one that may be expected to save most seconds is written first. When more bytes wait
  than allowed, those that save least are dropped, and of equals the oldest.
- While the engine has nothing to do, states are written at once. So are those that a caller of `flush` waits for.
- While the engine works, a state is written if there is credit, in seconds of a core. Credit comes in with the time,
  and with each load that saved computing. A write is charged when it is done, and may leave a debt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from .counters import StoreCounters
from .states import KeptState

# With a share of 0.01 and nothing for loads, 200 conversations with RAM for 20 of them computed 115,000 tokens, with
# these values 81,000. A load that shares nothing keeps 0.99 of its rate (ADR 014).
CREDIT_SHARE = 0.02  # seconds of a core for each second
RETURNED_SHARE = 0.2  # of the seconds that a load saved
MAX_CREDIT_S = 0.5  # what can be saved up, and is there at first: about 200 MB at once after a quiet time

MakeState = Callable[[], KeptState | None]


@dataclass(eq=False, slots=True)
class SaveOffer:
    """A state that waits to be written."""

    make: MakeState
    expected_saved_s: float  # that writing it may be expected to save
    num_bytes: int  # of memory that it holds meanwhile
    is_urgent: bool = False  # a caller of `flush` waits for it


class WriteCredit:
    """Seconds of a core that writing may take beside a working engine; negative for a debt."""

    def __init__(self, now: float) -> None:
        self._seconds = MAX_CREDIT_S
        self._at = now

    def add(self, seconds: float, now: float) -> None:
        """Add to the credit what was earned, or, with a negative number, what was spent."""
        saved_up_s = min(MAX_CREDIT_S, self._seconds + CREDIT_SHARE * max(0.0, now - self._at))
        self._seconds, self._at = min(MAX_CREDIT_S, saved_up_s + seconds), now

    def wait_s(self, now: float) -> float:
        """Return the seconds until the debt is paid; 0 if there is none."""
        self.add(0.0, now)
        return max(0.0, -self._seconds / CREDIT_SHARE)


class SaveQueue:
    """Any thread offers, one takes. The lock is never held for I/O, so the engine thread may take it, too."""

    def __init__(self, max_bytes: int, counters: StoreCounters, clock: Callable[[], float]) -> None:
        """At most `max_bytes` wait, or one state of any size."""
        self._changed = threading.Condition()
        self._max_bytes = max_bytes
        self._counters = counters
        self._clock = clock
        self._credit = WriteCredit(clock())
        self._waiting: list[SaveOffer] = []
        self._current: SaveOffer | None = None
        self._is_busy = False
        self._num_written = 0
        self.is_closed = False

    # Any thread

    def offer(self, make: MakeState, expected_saved_s: float, num_bytes: int) -> bool:
        """Return False if the state is not taken, because it saves nothing, or the queue is full of better ones."""
        offer = SaveOffer(make, expected_saved_s, num_bytes)
        with self._changed:
            if self.is_closed or not expected_saved_s > 0:
                return False
            self._waiting.append(offer)
            while len(self._waiting) > 1 and self._num_bytes() > self._max_bytes:
                self._drop(min(self._waiting, key=_expected_saved_s))
            self._changed.notify_all()
            return offer in self._waiting

    def note_busy(self, busy: bool) -> None:
        """The engine works, or has nothing to do."""
        if busy != self._is_busy:
            with self._changed:
                self._is_busy = busy
                self._changed.notify_all()

    def note_saved(self, seconds: float) -> None:
        """A load saved the engine so many seconds of computing."""
        with self._changed:
            self._credit.add(RETURNED_SHARE * seconds, self._clock())
            self._changed.notify_all()

    def flush(self, deadline: float) -> int:
        """Wait until all that waits now is written, or until `deadline`; return how many states were written.

        What the engine offers meanwhile keeps no caller waiting.
        """
        with self._changed:
            before = self._num_written
            pending = [*self._waiting, *([] if self._current is None else [self._current])]
            for offer in pending:
                offer.is_urgent = True
            self._changed.notify_all()
            while any(offer is self._current or offer in self._waiting for offer in pending):
                left_s = deadline - self._clock()
                if left_s <= 0 or self.is_closed:
                    break
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            return self._num_written - before

    def close(self) -> None:
        """Drop what waits. What is being written is given up at its next chunk."""
        with self._changed:
            self.is_closed = True
            while self._waiting:
                self._drop(self._waiting[0])
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """True if nothing waits, and nothing is being written."""
        return not self._waiting and self._current is None

    # The writing thread

    def take(self, timeout_s: float) -> SaveOffer | None:
        """Return the next state to write; None if there is none after `timeout_s`, or the queue is closed."""
        with self._changed:
            deadline = self._clock() + timeout_s
            while (offer := self._next()) is None:
                now = self._clock()
                if self.is_closed or now >= deadline:
                    return None
                debt_s = self._credit.wait_s(now) if self._waiting else 0.0
                self._changed.wait(min(deadline - now, debt_s or timeout_s))
            self._current = offer  # first: `is_idle` is asked without the lock
            self._waiting.remove(offer)
            return offer

    def done(self, written: bool, core_s: float) -> None:
        """The state that was taken is written, or dropped, which took `core_s` of a core."""
        with self._changed:
            if self._is_busy and self._current is not None and not self._current.is_urgent:
                self._credit.add(-core_s, self._clock())
            self._current = None
            self._num_written += written
            self._changed.notify_all()

    # Under the lock

    def _next(self) -> SaveOffer | None:
        allowed = [offer for offer in self._waiting if offer.is_urgent]
        if not allowed and not (self._is_busy and self._credit.wait_s(self._clock()) > 0):
            allowed = self._waiting
        return max(allowed, key=_expected_saved_s, default=None)

    def _num_bytes(self) -> int:
        """Bytes that wait, and those that are being written."""
        current = 0 if self._current is None else self._current.num_bytes
        return current + sum(offer.num_bytes for offer in self._waiting)

    def _drop(self, offer: SaveOffer) -> None:
        self._waiting.remove(offer)
        self._counters.add(drops=1)


def _expected_saved_s(offer: SaveOffer) -> float:
    return offer.expected_saved_s

"""States that wait to be written: the worthiest first, bounded in bytes and, beside a working engine, in age."""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .counters import Drop, Rate, Tally
from .states import KeptState

PATIENCE_S = 10.0  # of a state that waits beside a working engine: by then it is likely to be of no use any more
WRITING_S = 60.0  # how long writing one may take there, with its pauses: 1.2 s of a core or more, some hundred MB
MOST_WAITING = 4096
LOOK_S = 0.5  # between two looks for what has waited too long
SHARE = 0.02  # of one core
MOST_S = 0.5  # what it may have saved up, and has at first
RETURN = 0.2  # of the time that loads save: what shares much may write more, and what shares nothing does not
MOST_EARNED_S = 2.0
Maker = Callable[[], KeptState | None]


class Dropped(Exception):
    """The state is not written, or not to its end."""

    def __init__(self, reason: Drop) -> None:
        super().__init__(reason.value)
        self.reason = reason


class TimeBudget:
    """A bucket of seconds that fills by SHARE of each second, and by RETURN of what loads save."""

    def __init__(self, now: float) -> None:
        self._seconds = MOST_S
        self._at = now

    def spend(self, seconds: float, now: float) -> None:
        """It worked for so long."""
        self._fill(now)
        self._seconds -= seconds

    def earn(self, saved_s: float) -> None:
        """A load saved the engine so much computing."""
        self._seconds = min(MOST_EARNED_S, self._seconds + RETURN * saved_s)

    def wait_s(self, now: float) -> float:
        """Seconds until it may work again; 0 if it may now."""
        self._fill(now)
        return max(0.0, -self._seconds / SHARE)

    def within(self, seconds: float, now: float) -> float:
        """How much it may work from now on in so many seconds."""
        self._fill(now)
        return self._seconds + SHARE * seconds

    def _fill(self, now: float) -> None:
        self._seconds = max(self._seconds, min(MOST_S, self._seconds + SHARE * max(0.0, now - self._at)))
        self._at = now


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """A state, or what makes it."""

    state: KeptState | Maker
    worth_s: float
    num_bytes: int
    offered_at: float


class Flush(NamedTuple):
    """A caller waits until what was offered by `began` is written, at most until `deadline`."""

    began: float
    deadline: float


class SaveQueue:
    """Any thread offers, one takes. The lock is held for no I/O; the engine thread may offer, and say that it works."""

    def __init__(self, most_bytes: int, tally: Tally, clock: Callable[[], float]) -> None:
        self._changed = threading.Condition()
        self._most_bytes = most_bytes
        self._tally = tally
        self._clock = clock
        self._budget = TimeBudget(clock())
        self._cost = Rate()  # bytes per second of a core
        self._waiting: list[Offer] = []  # the least worthy first
        self._num_bytes = 0  # of all that waits, and of what is being written
        self._current: Offer | None = None
        self._begun_at = 0.0
        self._num_done = 0
        self._is_busy = False
        self._flushes: list[Flush] = []
        self._is_closed = False

    # Any thread

    def offer(self, state: KeptState | Maker, worth_s: float, num_bytes: int) -> bool:
        """False if it is not taken: it is worth nothing, or what waits is worth more and memory is bounded."""
        offer = Offer(state, worth_s, num_bytes, self._clock())
        with self._changed:
            if self._is_closed or not worth_s > 0:
                return False
            insort(self._waiting, offer, key=lambda waiting: waiting.worth_s)
            self._num_bytes += num_bytes
            while len(self._waiting) > 1 and self._is_too_much():
                if self._drop(0, Drop.QUEUE_FULL) is offer:
                    return False
            if len(self._waiting) == 1 or self._pause_s(offer.offered_at) <= 0:
                self._changed.notify_all()
        return True

    def note_busy(self, busy: bool) -> None:
        """The engine works, or has nothing to do."""
        if busy != self._is_busy:
            with self._changed:
                self._is_busy = busy
                self._changed.notify_all()

    def note_saved(self, seconds: float) -> None:
        """A state that was read saved the engine so much computing: so much more may be written beside it."""
        with self._changed:
            self._budget.earn(seconds)
            self._changed.notify_all()

    def flush(self, deadline: float) -> int:
        """Waits until all that waits now is written, whatever the engine does, or until `deadline`; how many were.

        What the engine offers meanwhile comes after it: a stream of new states keeps no caller waiting.
        """
        with self._changed:
            before, flush = self._num_done, Flush(self._clock(), deadline)
            self._flushes.append(flush)
            self._changed.notify_all()
            while not self._is_closed and self._has_older(flush.began) and (left_s := deadline - self._clock()) > 0:
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            self._flushes.remove(flush)
            return self._num_done - before

    def close(self) -> None:
        """What waits is dropped, and what is being written given up."""
        with self._changed:
            self._is_closed = True
            while self._waiting:
                self._drop(0, Drop.CLOSED)
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """True if nothing waits, nor is being written."""
        return not self._waiting and self._current is None

    # The writer

    def take(self) -> Offer | None:
        """The worthiest one, as soon as there is one and time for it; None when the queue is closed."""
        with self._changed:
            while not self._is_closed:
                now = self._clock()
                self._drop_old(now)
                index = self._next(now)
                if index is not None:
                    self._current, self._begun_at = self._waiting.pop(index), now
                    return self._current
                self._changed.wait(min(LOOK_S, self._pause_s(now) or LOOK_S) if self._waiting else None)
            return None

    def pause(self, spent_s: float) -> None:
        """Between two chunks: waits while the engine has to have the machine; raises Dropped if that takes too long."""
        with self._changed:
            self._charge(spent_s)
            while not self._is_closed:
                now = self._clock()
                pause_s = self._pause_s(now)
                if pause_s <= 0:
                    return
                left_s = self._begun_at + WRITING_S - now
                if left_s <= 0:
                    raise Dropped(Drop.BUSY)
                self._changed.wait(min(pause_s, left_s))
            raise Dropped(Drop.CLOSED)

    def done(self, written: bool, rest_s: float, all_s: float) -> None:
        """The one that was taken is written, or dropped. That took `all_s` of a core, of which `rest_s` is new."""
        with self._changed:
            self._charge(rest_s)
            if self._current is not None:
                self._num_bytes -= self._current.num_bytes
                if written:
                    self._cost.add(self._current.num_bytes, all_s)
            self._current = None
            self._num_done += written
            self._changed.notify_all()

    # Under the lock

    def _is_too_much(self) -> bool:
        return self._num_bytes > self._most_bytes or len(self._waiting) > MOST_WAITING

    def _has_leave(self, now: float) -> bool:
        """It may work as much as it wants."""
        return not self._is_busy or any(now < flush.deadline for flush in self._flushes)

    def _has_older(self, moment: float) -> bool:
        """Something that was offered by this moment waits, or is being written."""
        current = () if self._current is None else (self._current,)
        return any(offer.offered_at <= moment for offer in (*current, *self._waiting))

    def _charge(self, seconds: float) -> None:
        now = self._clock()
        if not self._has_leave(now):
            self._budget.spend(seconds, now)

    def _pause_s(self, now: float) -> float:
        return 0.0 if self._has_leave(now) else self._budget.wait_s(now)

    def _next(self, now: float) -> int | None:
        """Which one to write now. Beside a working engine not one that would be dropped before its end."""
        if not self._waiting or self._pause_s(now) > 0:
            return None
        worthiest_first = reversed(range(len(self._waiting)))
        if self._has_leave(now):
            began = max((flush.began for flush in self._flushes), default=now)
            return next((i for i in worthiest_first if self._waiting[i].offered_at <= began), len(self._waiting) - 1)
        most_bytes = self._budget.within(WRITING_S, now) * self._cost.bytes_per_s
        return next((i for i in worthiest_first if self._waiting[i].num_bytes < most_bytes), None)

    def _drop_old(self, now: float) -> None:
        if self._has_leave(now):
            return
        for index in reversed(range(len(self._waiting))):
            if now - self._waiting[index].offered_at > PATIENCE_S:
                self._drop(index, Drop.BUSY)

    def _drop(self, index: int, reason: Drop) -> Offer:
        offer = self._waiting.pop(index)
        self._num_bytes -= offer.num_bytes
        self._tally.drop(reason)
        return offer

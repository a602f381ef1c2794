"""The thread that writes states, and the queue that decides when each state is written (ADR 014).

- The state with the largest expected saving is written first. If the queued states exceed the memory limit, the states
  with the smallest savings are dropped. Among states with equal savings, the oldest is dropped first.
- While the engine is idle, states are written immediately. States that a caller of `flush` is waiting for are also
  written immediately.
- While the engine is computing, a state is written only if credit is available. Credit is measured in seconds of core
  time. The credit grows with time and with each load that saves computing time. The cost of a write is deducted after
  the write has finished, so the credit may become negative.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cellama.config.logging import event_logger
from cellama.engine.system.threads import give_way

from .catalog import MAX_SIZE_RATIO, StateCatalog
from .directory import DirectoryFull, StateDirectory, is_pinned, touch
from .state_file import file_bytes, write_state
from .states import StoreCounters, StoredState

log = event_logger(__name__)

# Measured with 200 conversations and RAM for 20 of them: with a share of 0.01 and no credit for loads, 115,000 tokens
# were computed; with these values, 81,000. Requests without shared prefixes keep 99% of their throughput (ADR 014).
CREDIT_SHARE = 0.02  # seconds of core time that the credit gains per second
RETURNED_SHARE = 0.2  # share of a load's saved seconds that is added to the credit
MAX_CREDIT_S = 0.5  # initial and maximum credit, enough to write about 200 MB at once
RETRY_S = 60.0  # seconds between attempts after a directory refused a write, because each attempt hashes a state
HOUSEKEEPING_S = 10.0  # seconds: maximum age of `used_bytes`, and delay before a file's last use is recorded
CLOSE_TIMEOUT_S = 5.0  # seconds; a thread that still waits for its disk after this time is abandoned
# Errors that concern one file name. After any other error, nothing is written to the directory for RETRY_S.
_FILE_ERRORS = {errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTEMPTY}

MakeState = Callable[[], StoredState | None]


class StoreClosed(Exception):
    """Raised to abandon an unfinished file when the store is closing."""


@dataclass(eq=False, slots=True)
class SaveOffer:
    """A state that is waiting to be written."""

    make: MakeState
    expected_saved_s: float  # expected saving in seconds
    num_bytes: int  # memory that the state occupies while it waits
    is_urgent: bool = False  # whether a caller of `flush` waits for it


class WriteCredit:
    """The core time in seconds that writing may use while the engine is computing.

    A negative value is a debt.
    """

    def __init__(self, now: float) -> None:
        self._seconds = MAX_CREDIT_S
        self._at = now

    def add(self, seconds: float, now: float) -> None:
        """Add earned seconds, or subtract spent seconds if `seconds` is negative."""
        accrued_s = min(MAX_CREDIT_S, self._seconds + CREDIT_SHARE * max(0.0, now - self._at))
        self._seconds, self._at = min(MAX_CREDIT_S, accrued_s + seconds), now

    def wait_s(self, now: float) -> float:
        """Return the time in seconds until the debt is paid off, or 0 if the credit is not negative."""
        self.add(0.0, now)
        return max(0.0, -self._seconds / CREDIT_SHARE)


class SaveQueue:
    """The states that are waiting to be written.

    Any thread may offer states, and a single thread takes states from the queue. The lock is not held during I/O.
    """

    def __init__(self, max_bytes: int, counters: StoreCounters, clock: Callable[[], float]) -> None:
        """Limit the total size of the waiting states to `max_bytes`. A single state may exceed this limit."""
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
        """Queue a state.

        Return False if the state would save no time, or if the queue is full and the queued states save more time.
        """
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
        """Set whether the engine is computing."""
        if busy != self._is_busy:
            with self._changed:
                self._is_busy = busy
                self._changed.notify_all()

    def note_saved(self, seconds: float) -> None:
        """Add credit for a load that saved the engine `seconds` of computing time."""
        with self._changed:
            self._credit.add(RETURNED_SHARE * seconds, self._clock())
            self._changed.notify_all()

    def flush(self, deadline: float) -> int:
        """Wait until all queued states have been written, or until `deadline`. Return the number of states written.

        States that are offered after the call don't extend the wait.
        """
        with self._changed:
            num_before = self._num_written
            pending = [*self._waiting, *([] if self._current is None else [self._current])]
            for offer in pending:
                offer.is_urgent = True
            self._changed.notify_all()
            while any(offer is self._current or offer in self._waiting for offer in pending):
                remaining_s = deadline - self._clock()
                if remaining_s <= 0 or self.is_closed:
                    break
                self._changed.wait(min(remaining_s, threading.TIMEOUT_MAX))
            return self._num_written - num_before

    def close(self) -> None:
        """Drop the waiting states. The state that is being written is abandoned at its next chunk."""
        with self._changed:
            self.is_closed = True
            while self._waiting:
                self._drop(self._waiting[0])
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether no states are being written or waiting to be written."""
        return not self._waiting and self._current is None

    # The writing thread

    def take(self, timeout_s: float) -> SaveOffer | None:
        """Wait for the next state that may be written. Return None after `timeout_s`, or if the queue is closed."""
        with self._changed:
            deadline = self._clock() + timeout_s
            while (offer := self._next()) is None:
                now = self._clock()
                if self.is_closed or now >= deadline:
                    return None
                debt_s = self._credit.wait_s(now) if self._waiting else 0.0
                self._changed.wait(min(deadline - now, debt_s or timeout_s))
            self._current = offer  # before it leaves `_waiting`, because `is_idle` does not take the lock
            self._waiting.remove(offer)
            return offer

    def done(self, written: bool, core_s: float) -> None:
        """Record that the state returned by `take` has been written or dropped.

        `core_s` is the core time in seconds to charge for the write.
        """
        with self._changed:
            if self._is_busy and self._current is not None and not self._current.is_urgent:
                self._credit.add(-core_s, self._clock())
            self._current = None
            self._num_written += written
            self._changed.notify_all()

    # With the lock held

    def _next(self) -> SaveOffer | None:
        allowed = [offer for offer in self._waiting if offer.is_urgent]
        if not allowed and not (self._is_busy and self._credit.wait_s(self._clock()) > 0):
            allowed = self._waiting
        return max(allowed, key=_expected_saved_s, default=None)

    def _num_bytes(self) -> int:
        """Return the total size in bytes of the waiting states and the state that is being written."""
        current = 0 if self._current is None else self._current.num_bytes
        return current + sum(offer.num_bytes for offer in self._waiting)

    def _drop(self, offer: SaveOffer) -> None:
        self._waiting.remove(offer)
        self._counters.add(drops=1)


def _expected_saved_s(offer: SaveOffer) -> float:
    return offer.expected_saved_s


class StateWriter:
    """Writes queued states until the queue is closed, and records which files have been used."""

    def __init__(
        self,
        directory: StateDirectory,
        catalog: StateCatalog,
        queue: SaveQueue,
        counters: StoreCounters,
        clock: Callable[[], float],
    ) -> None:
        self._directory, self._catalog, self._queue, self._counters = directory, catalog, queue, counters
        self._clock = clock
        self.used_bytes = 0  # size of all states in the directory, at most HOUSEKEEPING_S old
        self._count_at = clock()
        self._suspended_until = float("-inf")
        self._is_prepared = False
        self._is_failing = False  # whether the directory has refused a write since the last successful one
        self._used_keys: deque[str] = deque()
        self._thread = threading.Thread(target=self._run, name="cellama-kv-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has stopped, for at most CLOSE_TIMEOUT_S seconds."""
        self._thread.join(CLOSE_TIMEOUT_S)

    @property
    def is_suspended(self) -> bool:
        """Whether writing is suspended because a write to the directory has failed."""
        return self._clock() < self._suspended_until

    def note_used(self, key: str) -> None:
        """Record that a file has been read.

        The writer thread updates the directory, because the update may have to wait for an fsync.
        """
        self._used_keys.append(key)

    def _run(self) -> None:
        give_way()
        self._prepare()
        while not self._queue.is_closed:
            self._do_housekeeping()
            if (offer := self._queue.take(HOUSEKEEPING_S)) is not None:
                self._write(offer)
            del offer  # frees the memory of the state
        self._touch_used()

    def _do_housekeeping(self) -> None:
        self._touch_used()
        if self._clock() >= self._count_at:
            with contextlib.suppress(OSError, ValueError):
                self.used_bytes = sum(file.num_bytes for file in self._directory.states())
            self._count_at = self._clock() + HOUSEKEEPING_S

    def _touch_used(self) -> None:
        while self._used_keys:
            touch(self._catalog.path_of(self._used_keys.popleft()))

    def _write(self, offer: SaveOffer) -> None:
        started = time.thread_time()  # processor time only, because waiting for the disk does not delay the engine
        written = False
        try:
            state = offer.make()
            written = state is not None and self._save(state)
        except Exception:  # the boundary of the thread
            log.exception("KV state not written", detail="unexpected error; the state's tokens will be recomputed")
        finally:
            self._counters.add(drops=not written)
            self._counters.evictions = self._directory.num_evictions
            self._queue.done(written, time.thread_time() - started)

    def _save(self, state: StoredState) -> bool:
        """Write a state. Return False if the state was not written."""
        if not self.is_suspended and not self._is_prepared:
            self._prepare()
        if self.is_suspended or self._is_stored(state):
            return False
        try:
            self._write_file(state)
        except (StoreClosed, DirectoryFull) as reason:
            log.debug("KV state not written", reason=str(reason))
            return False
        except OSError as error:
            log.debug("KV state not written", reason=str(error))
            if error.errno not in _FILE_ERRORS:
                self._suspend(error)
            return False
        self._is_failing = False
        return True

    def _is_stored(self, state: StoredState) -> bool:
        """Return whether the directory already contains the state, or a longer state that can replace it.

        A longer state can replace a state if the longer state is of similar size and can be truncated to the same
        length.
        """
        match = self._catalog.longest(state.seed, state.tokens)
        count = len(state.tokens)
        if match is None or match.usable(count) < count or match.head.num_bytes > MAX_SIZE_RATIO * file_bytes(state):
            return False
        touch(self._catalog.path_of(match.head.key))
        return True

    def _write_file(self, state: StoredState) -> None:
        self._touch_used()  # so that files in use are not evicted
        replaced = self._catalog.replaced_by(state, file_bytes(state))
        file = self._directory.create(self._catalog.directory, file_bytes(state))
        try:
            head = write_state(file.descriptor, state, self._raise_if_closed)
            file.publish(head.key)
        finally:
            file.close()
        self._counters.add(saves=1, written_bytes=head.num_bytes)
        self._catalog.add(head)
        self._directory.remove(path for path in map(self._catalog.path_of, replaced) if not is_pinned(path))

    def _raise_if_closed(self) -> None:
        if self._queue.is_closed:
            raise StoreClosed("the store is closing")

    def _prepare(self) -> None:
        try:
            self._directory.prepare(self._catalog.directory)
            self._is_prepared = True
        except (OSError, ValueError) as error:  # a null byte in a path is a ValueError
            self._suspend(error)

    def _suspend(self, error: Exception) -> None:
        log.log(
            logging.DEBUG if self._is_failing else logging.WARNING,
            "writing of KV states suspended",
            directory=str(self._directory.root),
            retry_s=RETRY_S,
            detail=f"{error}; KV states stay in RAM only",
        )
        self._is_prepared, self._is_failing = False, True
        self._suspended_until = self._clock() + RETRY_S  # last, so that the line above is logged first

"""The watchdog: if a thread that has work makes no progress for too long, log the cause and end the process.

A thread that serves many requests reports to its `Pulse` when it starts a step and when it has no work. One watchdog
per process checks all pulses. After the process has ended, other processes take over its work. Without the watchdog, a
hang would block the work forever, and a failed thread would cause all of its work to fail.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from cellama.config.logging import event_logger

log = event_logger(__name__)

LOOK_S = 1.0  # seconds between two checks
AT_LEAST_S = 10.0  # seconds that any step may take, because a busy machine can delay a thread
MANY = 30  # allowed ratio of a step's duration to earlier steps of its size
FIRST_S = 600.0  # seconds for the first step of a slow kind (pages are loaded, kernels compiled), and upper limit
FADING = 0.999  # factor of the slowest duration with each step, which forgets it after a few thousand steps
PAGING = 50  # pages read from disk between two checks that count as progress, although as slow progress
BLOCKS_PER_PAGE = 8  # getrusage counts blocks of 512 bytes
EXIT_STALLED = 70  # sysexits.h: EX_SOFTWARE
REPORT_S = 10.0  # seconds to log a hang; after that, the process ends without a report
LAST_RESORT_S = 60.0  # minimum seconds without a check: none of cellama's calls holds the GIL for even a second

_is_ending = threading.Event()  # set while end_process runs, which has a shorter limit

Suspects = Iterable[str]


class WatchedStep(NamedTuple):
    """The step that a thread is executing. Steps are compared by identity."""

    kind: str
    size: int
    suspects: Suspects  # requests that the step works for
    began: float  # time.monotonic()
    first_s: float  # limit in seconds if no step of this kind has ended yet


class Pulse:
    """The progress of a thread.

    Only the thread itself may use the pulse, except for `name` and the fields for the watchdog.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.step: WatchedStep | None = None  # None while there is no work
        self.suspect: str | None = None  # the request of the step that the thread works for now
        self.on_death: Callable[[str], None] | None = None  # callback of the watchdog that watches it
        self.closed = False
        self._clock = clock
        self._slowest: dict[str, dict[int, float]] = {}  # seconds, by kind and by the bit length of the size

    def beat(self, kind: str, suspects: Suspects = (), size: int = 1, first_s: float = AT_LEAST_S) -> None:
        """Report that the previous step has ended, and that a step for the requests `suspects` has started.

        Steps of the same `kind` take longer if their `size` is larger. `first_s` limits the duration of the first step
        of a kind.
        """
        now = self._clock()
        self._note(now)
        self.suspect = None
        self.step = WatchedStep(kind, size, suspects, now, first_s)

    def rest(self) -> None:
        """Report that the thread has no work until the next `beat`."""
        self._note(self._clock())
        self.step = None

    def _note(self, now: float) -> None:
        if (step := self.step) is None:
            return
        bits, seconds = step.size.bit_length(), now - step.began
        slowest = self._slowest.get(step.kind)
        if slowest is None:
            slowest = self._slowest[step.kind] = {}
        before = slowest.get(bits, 0.0) * FADING
        slowest[bits] = seconds if seconds > before else before

    def longest_s(self, step: WatchedStep) -> float:
        """Return the duration in seconds after which a step of this kind and size counts as hanging.

        The watchdog calls this method while the step runs, so that a `beat` stays cheap.
        """
        expected_s = self._expected_s(step.kind, step.size)
        return step.first_s if expected_s is None else MANY * expected_s

    def _expected_s(self, kind: str, size: int) -> float | None:
        """Return the longest duration recorded for this size, or for the next larger size.

        If no larger size has been recorded, extrapolate from the largest size.
        """
        slowest, bits = dict(self._slowest.get(kind, ())), size.bit_length()
        if not slowest:
            return None
        if bits in slowest:
            return slowest[bits]
        larger = min((other for other in slowest if other > bits), default=None)
        return slowest[larger] if larger is not None else slowest[max(slowest)] * 2.0 ** (bits - max(slowest) + 1)

    @property
    def is_watched(self) -> bool:
        """Whether a watchdog will end the process if this thread fails."""
        return self.on_death is not None

    def die(self, reason: str) -> None:
        """Report that the thread is ending because of an unexpected error.

        If a watchdog is watching the thread, this method doesn't return.
        """
        if self.on_death is not None:
            self.on_death(f"thread {self.name!r} failed: {reason}")
        self.close()

    def close(self) -> None:
        """Report that the thread is ending normally."""
        self.step, self.closed = None, True


@dataclass(slots=True)
class _Watch:
    pulse: Pulse
    step: WatchedStep | None = None  # step at the last check
    stalled_s: float = 0.0  # time since then without another step


class Watchdog:
    """Checks the pulses of a process. Once started, its thread calls `look` every second."""

    def __init__(
        self,
        at_least_s: float = AT_LEAST_S,
        end: Callable[[str], None] | None = None,
        num_paged: Callable[[], int] | None = None,
        last_resort_s: float = 0.0,
    ) -> None:
        """Create a watchdog. The limit for a step is never below `at_least_s`.

        `end` is called with the reason, and ends the process. `num_paged` returns the number of pages that the process
        has read from disk. If the watchdog's thread doesn't run a check for `last_resort_s`, C code that doesn't need
        the GIL ends the process. The watchdog's thread may miss checks while another thread holds the GIL, or after the
        process was suspended. Values of `last_resort_s` below `LAST_RESORT_S` or below twice `at_least_s` are raised to
        the larger of these limits.
        """
        self._last_resort_s = max(LAST_RESORT_S, 2 * at_least_s, last_resort_s)
        self._at_least_s = at_least_s
        self._end = end or end_process
        self._num_paged = num_paged or _num_paged
        self._paged = self._num_paged()
        self._watches: list[_Watch] = []
        self._looked_at: float | None = None
        self._armed_at = 0.0  # time.monotonic() at which the last resort was postponed
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, *pulses: Pulse) -> None:
        """Watch these pulses. If the thread of a pulse fails or hangs, the process ends.

        Any thread may call this method.
        """
        for pulse in pulses:
            pulse.on_death = self._end
            with self._lock:
                self._watches.append(_Watch(pulse))

    def look(self, now: float) -> None:
        """End the process if a thread has not started a new step for too long.

        Each check counts at most two check intervals as elapsed, because threads can't make progress while the process
        is suspended.
        """
        elapsed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * LOOK_S)
        self._looked_at = now
        paged, self._paged = self._paged, self._num_paged()
        is_paging = self._paged - paged >= PAGING
        with self._lock:
            self._watches = [watch for watch in self._watches if not watch.pulse.closed]
            watches = list(self._watches)
        for watch in watches:
            step = watch.pulse.step
            if step is None or step is not watch.step:
                watch.step, watch.stalled_s = step, 0.0
                continue
            watch.stalled_s += 0.0 if is_paging else elapsed_s
            limit_s = max(watch.pulse.longest_s(step), self._at_least_s)
            if watch.stalled_s > min(limit_s, max(FIRST_S, self._at_least_s)):
                self._end(_reason(watch.pulse, step, watch.stalled_s))

    def start(self) -> None:
        """Start the thread that checks the pulses every second."""
        self._arm_last_resort()
        self._thread = threading.Thread(target=self._run, name="cellama-watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            if time.monotonic() - self._armed_at > self._last_resort_s:
                continue  # the timer has expired and will end the process, so it must not be postponed
            self._arm_last_resort()
            self.look(time.monotonic())

    def _arm_last_resort(self) -> None:
        """Set faulthandler's timer.

        The timer's C thread ends the process after `last_resort_s`, unless the timer is reset before then. The C thread
        reads the stacks without the GIL. If another thread is running at the same time, for example after a suspension,
        reading the stacks can crash the process. The process then ends with SIGSEGV instead of exit code 1.
        """
        if not _is_ending.is_set():
            faulthandler.dump_traceback_later(self._last_resort_s, exit=True, file=2)
            self._armed_at = time.monotonic()

    def close(self) -> None:
        """Stop watching. After this call, a failing thread no longer ends the process."""
        self._closing.set()
        with self._lock:
            for watch in self._watches:
                watch.pulse.on_death = None
            self._watches.clear()
        if self._thread is not None:
            self._thread.join(2 * LOOK_S)
            faulthandler.cancel_dump_traceback_later()


def _reason(pulse: Pulse, step: WatchedStep, stalled_s: float) -> str:
    suspects = pulse.suspect or ", ".join(step.suspects) or "no request in particular"
    return f"thread {pulse.name!r} has been in one step ({step.kind}) for {stalled_s:.0f} s, working for: {suspects}"


def end_process(reason: str) -> None:
    """Log the reason and the stacks of all threads, then end the process immediately. This function never returns."""
    _is_ending.set()
    # The hanging thread may hold a lock of the logging system. Then C code ends the process, which needs no lock.
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback_later(REPORT_S, exit=True, file=2)
    try:
        log.critical("process exiting", detail=f"{reason}; other processes resume this process's jobs\n{stacks()}")
        logging.shutdown()
    finally:
        os._exit(EXIT_STALLED)


def stacks() -> str:
    """Return the Python stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def _num_paged() -> int:
    try:
        import resource
    except ImportError:  # not available on this system
        return 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt + usage.ru_inblock // BLOCKS_PER_PAGE

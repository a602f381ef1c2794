"""Knows when a thread that has work makes no step for too long, says where it hangs and for whom, and ends the process.

A thread that serves many beats its `Pulse` at the beginning of every step, and rests it when there is nothing to do.
One watchdog per process looks at all of them. What is unfinished goes on in another process; a hang would hold it for
ever, and a thread that died would fail it all.
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

log = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds between two looks
AT_LEAST_S = 10.0  # seconds that any step may take: a busy machine can hold up a thread for some
MANY = 30  # times what a step of its size took before
FIRST_S = 600.0  # for a kind of step that is long at first (pages come in, kernels are compiled), and never more
FADING = 0.999  # factor of the slowest step with each step: it is forgotten after some thousand steps
PAGING = 50  # pages read from disk between two looks: it is slow, but it goes on
BLOCKS_PER_PAGE = 8  # getrusage counts blocks of 512 bytes
EXIT_STALLED = 70  # sysexits.h: EX_SOFTWARE
REPORT_S = 10.0  # seconds; a hang that can't be logged within them ends the process without a report
LAST_RESORT_S = 60.0  # at least, without a look of the watchdog: none of our own calls holds the GIL for a second

_is_ending = threading.Event()  # end_process runs: its own, shorter limit holds

Suspects = Iterable[str]


class WatchedStep(NamedTuple):
    """What a thread does just now; told apart from the next one by identity."""

    kind: str
    size: int
    suspects: Suspects  # the requests that it does it for
    began: float  # time.monotonic()
    longest_s: float


class Pulse:
    """What a thread tells of its steps. Its owner's thread only, but for `name` and what the watchdog reads."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.step: WatchedStep | None = None  # None: nothing to do
        self.suspect: str | None = None  # of the step's requests the one that it does it for just now
        self.on_death: Callable[[str], None] | None = None  # of the watchdog that looks after it
        self.closed = False
        self._clock = clock
        self._slowest: dict[str, dict[int, float]] = {}  # seconds, by kind and by the number of bits of the size

    def beat(self, kind: str, suspects: Suspects = (), size: int = 1, first_s: float = AT_LEAST_S) -> None:
        """A step begins, for the requests `suspects`; the one before is over.

        Steps of one kind take more time the larger their `size`. `first_s` is for those before any has ended.
        """
        now = self._clock()
        self._note(now)
        expected_s = self._expected_s(kind, size)
        self.suspect = None
        longest_s = first_s if expected_s is None else MANY * expected_s
        self.step = WatchedStep(kind, size, suspects, began=now, longest_s=longest_s)

    def rest(self) -> None:
        """There is nothing to do until the next beat."""
        self._note(self._clock())
        self.step = None

    def _note(self, now: float) -> None:
        step = self.step
        if step is not None:
            slowest, bits = self._slowest.setdefault(step.kind, {}), step.size.bit_length()
            slowest[bits] = max(now - step.began, slowest.get(bits, 0.0) * FADING)

    def _expected_s(self, kind: str, size: int) -> float | None:
        """What the slowest step of this size took of late, or of the next larger one; else as the largest promises."""
        slowest, bits = self._slowest.get(kind), size.bit_length()
        if not slowest:
            return None
        if bits in slowest:
            return slowest[bits]
        larger = min((other for other in slowest if other > bits), default=None)
        return slowest[larger] if larger is not None else slowest[max(slowest)] * 2.0 ** (bits - max(slowest) + 1)

    @property
    def is_watched(self) -> bool:
        """True if the process ends with this thread."""
        return self.on_death is not None

    def die(self, reason: str) -> None:
        """The thread ends for an unforeseen reason. Does not return where a watchdog looks after it."""
        if self.on_death is not None:
            self.on_death(f"thread {self.name!r} died: {reason}")
        self.close()

    def close(self) -> None:
        """The thread ends in order."""
        self.step, self.closed = None, True


@dataclass(slots=True)
class _Watch:
    pulse: Pulse
    step: WatchedStep | None = None  # at the last look
    stalled_s: float = 0.0  # since then without another


class Watchdog:
    """Looks at the pulses of a process. `look` is pure but for `end`; `start` calls it again and again."""

    def __init__(
        self,
        at_least_s: float = AT_LEAST_S,
        end: Callable[[str], None] | None = None,
        num_paged: Callable[[], int] | None = None,
        last_resort_s: float = 0.0,
    ) -> None:
        """No step of less than `at_least_s` is too long. `end` gets the reason; it ends the process by default.

        `num_paged` counts the pages that the process has read from disk. After `start`, code that needs no GIL ends the
        process if the watchdog's thread can't look for `last_resort_s` (at least `LAST_RESORT_S`, and twice
        `at_least_s`), because another thread keeps the GIL, or because the process was suspended for that long.
        """
        self._last_resort_s = max(LAST_RESORT_S, 2 * at_least_s, last_resort_s)
        self._at_least_s = at_least_s
        self._end = end or end_process
        self._num_paged = num_paged or _num_paged
        self._paged = self._num_paged()
        self._watches: list[_Watch] = []
        self._looked_at: float | None = None
        self._armed_at = 0.0  # time.monotonic() at which the last resort was put off
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, *pulses: Pulse) -> None:
        """From now on the process ends with one of these threads, or when it hangs. Any thread."""
        for pulse in pulses:
            pulse.on_death = self._end
            with self._lock:
                self._watches.append(_Watch(pulse))

    def look(self, now: float) -> None:
        """Ends the process if a thread has made no step for too long.

        Only time between two looks counts: in a process that was suspended no thread makes steps.
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
            if watch.stalled_s > min(max(step.longest_s, self._at_least_s), max(FIRST_S, self._at_least_s)):
                self._end(_reason(watch.pulse, step, watch.stalled_s))

    def start(self) -> None:
        """Looks every second, in a thread."""
        self._arm_last_resort()
        self._thread = threading.Thread(target=self._run, name="cellama-watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            if time.monotonic() - self._armed_at > self._last_resort_s:
                continue  # the timer is due, and ends the process: a look must not put it off
            self._arm_last_resort()
            self.look(time.monotonic())

    def _arm_last_resort(self) -> None:
        """Let the C thread of faulthandler end the process after `last_resort_s`, unless this is called again.

        It reads the stacks without the GIL. If another thread runs meanwhile, as after a suspension, reading can crash,
        and the exit is a SIGSEGV instead of 1.
        """
        if not _is_ending.is_set():
            faulthandler.dump_traceback_later(self._last_resort_s, exit=True, file=2)
            self._armed_at = time.monotonic()

    def close(self) -> None:
        """Looks no more; threads may end as they like from now on."""
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
    return f"thread {pulse.name!r} has been in one step ({step.kind}) for {stalled_s:.0f} s; it works for: {suspects}"


def end_process(reason: str) -> None:
    """Logs the reason and the stacks of all threads, then ends the process at once. Does not return."""
    _is_ending.set()
    # The hanging thread may hold a lock of the logging: then C code ends the process, which needs neither.
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback_later(REPORT_S, exit=True, file=2)
    try:
        log.critical("%s; the process ends, so that its jobs go on elsewhere\n%s", reason, stacks())
        logging.shutdown()
    finally:
        os._exit(EXIT_STALLED)


def stacks() -> str:
    """Where all threads of this process are, in Python."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def _num_paged() -> int:
    try:
        import resource
    except ImportError:  # not on this system
        return 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt + usage.ru_inblock // BLOCKS_PER_PAGE

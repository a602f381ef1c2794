"""Celery's threads pool, with what the stock one lacks: cancel, time limits, and acks while it drains.

Each running job has a JobControl, by which Celery's main thread or a timer ends the wait of the job's thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from enum import IntEnum
from typing import Any

from celery.concurrency.base import BasePool, apply_target
from kombu.asynchronous import get_event_loop

from cellama.config import get_settings
from cellama.tasks.connection.kombu_internals import run_ready_callbacks

log = logging.getLogger(__name__)

DRAIN_PUMP_S = 0.1


class Interruption(IntEnum):
    """Why a job must end before its time; a higher one replaces a lower one."""

    HANDED_BACK = 1  # the worker ends; another one goes on with it
    SOFT_LIMIT = 2
    HARD_LIMIT = 3
    CANCELLED = 4
    SUPERSEDED = 5  # another attempt of the job has begun, or it has ended, so this run is superseded
    FAILED = 6  # its events could not be written: its stream has ended with an error


class JobControl:
    """Ends one job from another thread. Its `terminate` is the interface that Celery's Request expects."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.interruption: Interruption | None = None
        self.is_settled = False  # Redis has the job's end and result, and its message is gone
        self._stop: Callable[[Interruption], None] | None = None
        self._ended = False
        self._lock = threading.Lock()

    def when_interrupted(self, stop: Callable[[Interruption], None]) -> None:
        """Calls `stop` when the job is interrupted, at once if it is already."""
        with self._lock:
            self._stop = stop
            reason = self.interruption
        if reason is not None:
            stop(reason)

    def interrupt(self, reason: Interruption) -> None:
        """Ends the job for this reason. Idempotent."""
        with self._lock:
            if self._ended or (self.interruption is not None and self.interruption >= reason):
                return
            self.interruption = reason
            stop = self._stop
        if stop is not None:
            stop(reason)

    def terminate(self, signal: int | None = None) -> None:
        self.interrupt(Interruption.CANCELLED)

    def claim_end(self) -> bool:
        """True for the one caller that may tell Celery how the job ended."""
        with self._lock:
            first, self._ended = not self._ended, True
        return first


_current: ContextVar[JobControl | None] = ContextVar("cellama_job_control", default=None)


def current_job() -> JobControl:
    """The control of the job that runs in this thread; outside a pool, one of its own."""
    return _current.get() or JobControl(0)


class TaskPool(BasePool):  # type: ignore[misc]
    """One thread per job that waits; the work itself is done by the engine threads."""

    limit: int  # jobs of all models, as `inspect stats` shows it; what bounds them is Places
    signal_safe = False
    body_can_be_buffer = True
    task_join_will_block = False

    def on_start(self) -> None:
        self._numbers = itertools.count(1)
        self.in_a_hurry = False
        self.drained_at = 0.0  # monotonic: until then running jobs may finish, once it stops
        self._jobs: dict[int, tuple[JobControl, Future[None]]] = {}
        # Places bounds the jobs; this only bounds threads.
        self._executor = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="cellama-job")

    def on_apply(
        self,
        target: Callable[..., Any],
        args: Any = None,
        kwargs: Any = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        timeout: float | None = None,
        soft_timeout: float | None = None,
        timeout_callback: Callable[[bool, float], None] | None = None,
        **_: Any,
    ) -> JobControl:
        """Runs a job in a thread. Returns what Celery terminates it by."""
        control = JobControl(next(self._numbers))
        soft_timeout = soft_timeout or self.options.get("soft_timeout")
        timeout = timeout or self.options.get("timeout")
        timers = self._start_timers(control, soft_timeout, timeout, timeout_callback)

        def run() -> None:
            _current.set(control)
            try:
                apply_target(target, args or (), kwargs, _once(control, callback), accept_callback, pid=control.number)
            except Exception:
                log.exception("Celery could not take the end of a job")
            finally:
                _current.set(None)  # a thread that waits for its next job keeps nothing of the last one
                self._jobs.pop(control.number, None)
                for timer in timers:
                    timer.cancel()

        # The strong reference that Celery's Request does not keep. The job may end before it stands there.
        future = self._executor.submit(run)
        self._jobs[control.number] = (control, future)
        future.add_done_callback(lambda _: self._jobs.pop(control.number, None))
        return control

    def _start_timers(
        self,
        control: JobControl,
        soft_timeout: float | None,
        timeout: float | None,
        timeout_callback: Callable[[bool, float], None] | None,
    ) -> list[threading.Timer]:
        def soft() -> None:
            if timeout_callback is not None:
                timeout_callback(True, soft_timeout or 0)
            control.interrupt(Interruption.SOFT_LIMIT)

        def hard() -> None:
            control.interrupt(Interruption.HARD_LIMIT)
            if control.claim_end() and timeout_callback is not None:
                timeout_callback(False, timeout or 0)

        timers = [threading.Timer(s, f) for s, f in ((soft_timeout, soft), (timeout, hard)) if s]
        for timer in timers:
            timer.daemon = True
            timer.start()
        return timers

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Cancels a job by its number. Must not raise: Celery then marks it revoked and acks it."""
        job = self._jobs.get(pid)
        if job is not None:
            job[0].terminate(signal)

    def on_stop(self) -> None:
        """Lets running jobs finish, and Celery's acks and timers go on meanwhile; hands back what takes too long."""
        hub = get_event_loop()
        self.drained_at = deadline = time.monotonic() + get_settings().drain_s
        while jobs := list(self._jobs.values()):
            if self.in_a_hurry or time.monotonic() >= deadline:
                for control, _ in jobs:
                    control.interrupt(Interruption.HANDED_BACK)
                if (runtime := getattr(self.app, "runtime", None)) is not None:
                    runtime.publisher.hurry()  # jobs wait for what it writes: for ever, if Redis is away
            wait([future for _, future in jobs], timeout=DRAIN_PUMP_S, return_when=FIRST_COMPLETED)
            if hub is not None:
                hub.fire_timers()
                run_ready_callbacks(hub)
        self._executor.shutdown()
        if hub is not None:
            run_ready_callbacks(hub)

    def hurry(self) -> None:
        """Hands running jobs back instead of letting them finish, now or when the pool stops."""
        self.in_a_hurry = True

    def on_terminate(self) -> None:
        """Hands running jobs back at once."""
        for control, _ in list(self._jobs.values()):
            control.interrupt(Interruption.HANDED_BACK)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def grow(self, n: int = 1) -> None:
        self.limit += n

    def shrink(self, n: int = 1) -> None:
        self.limit = max(1, self.limit - n)

    @property
    def num_processes(self) -> int:
        return int(self.limit)

    def _get_info(self) -> dict[str, Any]:
        info = {**super()._get_info(), "max-concurrency": self.limit, "running-jobs": len(self._jobs)}
        runtime = getattr(self.app, "runtime", None)
        return info if runtime is None else {**info, "slots": runtime.describe_slots()}


def _once(control: JobControl, callback: Callable[..., Any] | None) -> Callable[..., Any]:
    """The callback of a job that ends by itself; nothing if a time limit ended it before."""

    def call(*args: Any, **kwargs: Any) -> None:
        if callback is not None and control.claim_end():
            callback(*args, **kwargs)

    return call

"""A thread pool for Celery that supports cancellation and time limits, and acknowledges messages while it drains.

Each running job has a JobControl. Celery's main thread or a timer uses the JobControl to interrupt the job's thread.
"""

from __future__ import annotations

import itertools
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
from cellama.config.logging import event_logger
from cellama.tasks.connection.kombu_internals import run_ready_callbacks

log = event_logger(__name__)

DRAIN_PUMP_S = 0.1  # how often acknowledgements and timers run while the pool stops, which blocks the event loop


class Interruption(IntEnum):
    """The reason why an attempt must end early. A reason with a higher value replaces a reason with a lower value."""

    HANDED_BACK = 1  # the worker exits, and another worker continues the job
    SOFT_LIMIT = 2
    HARD_LIMIT = 3
    CANCELLED = 4
    SUPERSEDED = 5  # another attempt at the job has started, or the job has ended
    FAILED = 6  # events could not be written, so the stream has ended with an error


class JobControl:
    """Lets other threads interrupt one job. Celery's Request calls `terminate`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.interruption: Interruption | None = None
        self.is_settled = False  # whether Redis has the job's end and result, and the message is released
        self._stop: Callable[[Interruption], None] | None = None
        self._outcome = ""
        self._ended = False
        self._lock = threading.Lock()

    def when_interrupted(self, stop: Callable[[Interruption], None]) -> None:
        """Call `stop` when the job is interrupted, or immediately if the job is already interrupted."""
        with self._lock:
            self._stop = stop
            reason = self.interruption
        if reason is not None:
            stop(reason)

    def interrupt(self, reason: Interruption) -> None:
        """Interrupt the job for this reason. This method is idempotent."""
        with self._lock:
            if self._ended or (self.interruption is not None and self.interruption >= reason):
                return
            self.interruption = reason
            stop = self._stop
        if stop is not None:
            stop(reason)

    def terminate(self, signal: int | None = None) -> None:
        self.interrupt(Interruption.CANCELLED)

    def claim_outcome(self, outcome: str) -> bool:
        """Claim an outcome for the job, and return whether the job ends with this outcome.

        The outcome that is claimed first wins. A revoke can arrive while a failing job is ending. Without this claim,
        Celery could store REVOKED while the stream ends with the error.
        """
        with self._lock:
            self._outcome = self._outcome or outcome
            return self._outcome == outcome

    @property
    def is_revoked(self) -> bool:
        """Return whether Celery itself stores the state REVOKED, before it interrupts the job."""
        return self._outcome == "revoked"

    def claim_end(self) -> bool:
        """Return True for the first caller, which is the only caller that may report the job's outcome to Celery."""
        with self._lock:
            first, self._ended = not self._ended, True
        return first


_current: ContextVar[JobControl | None] = ContextVar("cellama_job_control", default=None)


def current_job() -> JobControl:
    """Return the JobControl of the job that is running in this thread, or a new JobControl if no job is running."""
    return _current.get() or JobControl(0)


class TaskPool(BasePool):  # type: ignore[misc]
    """A pool with one thread per job. The thread mostly waits for the engine."""

    limit: int  # jobs of all models, for `inspect stats`; `JobLimits` is what limits the jobs
    signal_safe = False
    body_can_be_buffer = True
    task_join_will_block = False

    def on_start(self) -> None:
        self._numbers = itertools.count(1)
        self.in_a_hurry = False
        self.drained_at = 0.0  # deadline for running jobs once the pool stops, in monotonic seconds
        self._jobs: dict[int, tuple[JobControl, Future[None]]] = {}
        # `JobLimits` limits the number of jobs. This only limits the number of threads.
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
        """Run a job in a thread, and return the JobControl that Celery uses to terminate the job."""
        control = JobControl(next(self._numbers))
        soft_timeout = soft_timeout or self.options.get("soft_timeout")
        timeout = timeout or self.options.get("timeout")
        timers = self._start_timers(control, soft_timeout, timeout, timeout_callback)

        def run() -> None:
            _current.set(control)
            try:
                apply_target(target, args or (), kwargs, _once(control, callback), accept_callback, pid=control.number)
            except Exception:
                log.exception("job outcome not reported to Celery")
            finally:
                _current.set(None)  # so that an idle thread has no reference to its last job
                self._jobs.pop(control.number, None)
                for timer in timers:
                    timer.cancel()

        # Celery's Request has only a weak reference. The job may end before the next line, so the callback removes it.
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
        """Cancel the job that runs under the number `pid`.

        This method must not raise, because Celery would then mark the job as revoked and acknowledge its message.
        """
        job = self._jobs.get(pid)
        if job is not None:
            job[0].terminate(signal)

    def on_stop(self) -> None:
        """Let running jobs finish until the deadline, and return the remaining jobs to their queues.

        Meanwhile, Celery's acknowledgements and timers keep running.
        """
        hub = get_event_loop()
        self.drained_at = deadline = time.monotonic() + get_settings().drain_s
        while jobs := list(self._jobs.values()):
            if self.in_a_hurry or time.monotonic() >= deadline:
                for control, _ in jobs:
                    control.interrupt(Interruption.HANDED_BACK)
                if (runtime := getattr(self.app, "runtime", None)) is not None:
                    runtime.publisher.hurry()  # else jobs wait for its writes as long as Redis is unreachable
            wait([future for _, future in jobs], timeout=DRAIN_PUMP_S, return_when=FIRST_COMPLETED)
            if hub is not None:
                hub.fire_timers()
                run_ready_callbacks(hub)
        self._executor.shutdown()
        if hub is not None:
            run_ready_callbacks(hub)

    def hurry(self) -> None:
        """Make `on_stop` return running jobs to their queues instead of letting them finish."""
        self.in_a_hurry = True

    def on_terminate(self) -> None:
        """Return running jobs to their queues immediately."""
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
    """Wrap a job's callback so that it does nothing if a time limit has already ended the job."""

    def call(*args: Any, **kwargs: Any) -> None:
        if callback is not None and control.claim_end():
            callback(*args, **kwargs)

    return call

"""Run threads that use Redis periodically and wait while Redis is unreachable.

Many threads of a process wait and retry during an outage, but the outage is logged only once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from redis.exceptions import RedisError

from cellama.config.logging import event_logger

from .redis_errors import RefusedForNow, is_passing

log = event_logger(__name__)


class RedisWaits:
    """Logs when the first thread starts waiting in an outage, and when the last thread has stopped waiting.

    All methods are thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        self._since = 0.0  # monotonic s

    def started(self, waiter: str, error: BaseException) -> None:
        """Record that `waiter`, for example a thread, is waiting for Redis. This method may be called at each retry."""
        with self._lock:
            first = not self._waiting
            self._waiting.add(waiter)
            if first:
                self._since = time.monotonic()
        if first:
            event = "Redis refuses commands" if isinstance(error, RefusedForNow) else "Redis does not answer"
            log.warning(event, waiter=waiter, detail=f"{error}; all work that needs Redis is paused")

    def ended(self, waiter: str) -> None:
        """Record that `waiter` has stopped waiting. This method may be called even if `started` was never called."""
        if waiter not in self._waiting:
            return
        with self._lock:
            self._waiting.discard(waiter)
            last = not self._waiting
        if last:
            outage_s = round(time.monotonic() - self._since, 1)
            log.warning("Redis accepts commands again", outage_s=outage_s, detail="work resumes")

    @contextmanager
    def of(self, waiter: str) -> Iterator[Callable[[BaseException], None]]:
        """Yield a function to call at each retry within the block.

        When the block ends, `waiter` counts as no longer waiting.
        """
        try:
            yield partial(self.started, waiter)
        finally:
            self.ended(waiter)


redis_waits = RedisWaits()  # for this process


class RedisLoop:
    """Calls an action periodically in a separate thread, from `start` until `close`.

    An action that fails is logged, and retried after `retry_s`. Outages of Redis are logged once per process
    (`redis_waits`).
    """

    def __init__(
        self,
        name: str,
        action: Callable[[], object],
        period_s: float,
        *,
        retry_s: float | None = None,
        acts_first: bool = False,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare the thread. `start` starts the thread.

        `name` appears in the thread's name and in logs. The thread first calls `action` after one period, or
        immediately if `acts_first` is true. The thread calls `finish` before it ends.
        """
        self._name = name
        self._action = action
        self._period_s = period_s
        self._retry_s = period_s if retry_s is None else retry_s
        self._first_wait_s = 0.0 if acts_first else period_s
        self._finish = finish
        self._due = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"cellama-{name}", daemon=True)

    @property
    def is_started(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Call the action immediately instead of at the end of the current period."""
        self._due.set()

    def close(self, timeout_s: float) -> None:
        """Stop the thread after the current action, and wait up to `timeout_s` seconds for the thread to end."""
        self._is_closing = True
        self._due.set()
        if self.is_started:
            self._thread.join(timeout=timeout_s)

    def _run(self) -> None:
        wait_s = self._first_wait_s
        while True:
            self._due.wait(wait_s)
            self._due.clear()
            if self._is_closing:
                break
            wait_s = self._period_s if self._act() else self._retry_s
        self._finish()

    def _act(self) -> bool:
        try:
            self._action()
        except RedisError as error:
            if is_passing(error):
                redis_waits.started(f"the {self._name} thread", error)
            else:
                log.warning("Redis refused a command", thread=self._name, detail=f"{error}; the action will be retried")
            return False
        except Exception:
            log.exception("periodic action failed", thread=self._name, detail="the action will be retried")
            return False
        redis_waits.ended(f"the {self._name} thread")
        return True

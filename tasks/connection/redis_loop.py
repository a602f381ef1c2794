"""A thread that does something with Redis in each period, and waits while Redis is away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from redis.exceptions import RedisError

from .redis_errors import is_passing
from .redis_waits import redis_waits

log = logging.getLogger(__name__)


class RedisLoop:
    """Calls an action in each period, in a thread of its own, from `start` to `close`.

    An action that fails is logged, and retried after `retry_s`. Outages of Redis are logged once for the whole process
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
        """`name` is that of the thread, and of what waits for Redis. `finish` is called in the thread when it ends.

        The first action comes after a period, or at once with `acts_first`.
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
        """Call the action now instead of at the end of the period."""
        self._due.set()

    def close(self, timeout_s: float) -> None:
        """End the thread after the action that runs, and wait for it."""
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
                redis_waits.began(f"the {self._name} thread", error)
            else:
                log.warning("%s: Redis refuses a command: %s; it is retried", self._name, error)
            return False
        except Exception:
            log.exception("%s: failed; it is retried", self._name)
            return False
        redis_waits.ended(f"the {self._name} thread")
        return True

"""Log once per outage that a process waits for Redis, although many of its threads wait and retry."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from .refusals import RefusedForNow

log = logging.getLogger(__name__)


class RedisWaits:
    """Logs the first wait of an outage, and the end of the last one. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        self._since = 0.0  # monotonic s

    def began(self, who: str, error: BaseException) -> None:
        """Note that `who` waits. May be called at each retry."""
        with self._lock:
            first = not self._waiting
            self._waiting.add(who)
            if first:
                self._since = time.monotonic()
        if first:
            what = "refuses commands for now" if isinstance(error, RefusedForNow) else "does not answer"
            log.warning("Redis %s: %s; %s waits, and whatever else needs Redis", what, error, who)

    def ended(self, who: str) -> None:
        """Note that `who` does not wait any more. May be called without a `began`."""
        if who not in self._waiting:
            return
        with self._lock:
            self._waiting.discard(who)
            last = not self._waiting
        if last:
            log.warning("Redis accepts commands again after %.1f s; the work resumes", time.monotonic() - self._since)

    @contextmanager
    def of(self, who: str) -> Iterator[Callable[[BaseException], None]]:
        """Give what to call at each retry within the block; after it, `who` does not wait any more."""
        try:
            yield partial(self.began, who)
        finally:
            self.ended(who)


redis_waits = RedisWaits()  # of this process

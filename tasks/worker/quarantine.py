"""Where jobs run that may have ended a worker: one at a time, so that it is known which one it was."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

POLL_S = 0.1


class Quarantine:
    """A lock that its holder's first token opens, seen by another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def hold(self, give_up: Callable[[], bool]) -> Iterator[Callable[[], None]]:
        """Waits for its turn, until `give_up`; the body gets what ends the turn early, on any thread."""
        while not (mine := self._lock.acquire(timeout=POLL_S)) and not give_up():
            pass
        ending = threading.Lock()

        def end() -> None:
            nonlocal mine
            with ending:
                if mine:
                    mine = False
                    self._lock.release()

        try:
            yield end
        finally:
            end()

"""Where jobs prove that they end no worker: together at first; one that may have ended a worker, alone.

A job is unproven until its first token is in Redis, or its end. When a worker dies, each job that was unproven then is
a suspect. Its next attempt begins once no other job is unproven, and none begins before it is proven: if the worker
dies again, it is known which job it was, and no other one is blamed for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

POLL_S = 0.1  # between two checks whether a waiting job was interrupted


class Quarantine:
    """A gate for unproven jobs, on any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_unproven = 0
        self._num_suspects = 0  # that wait, or are unproven

    @contextlib.contextmanager
    def passed(self, give_up: Callable[[], bool], *, alone: bool) -> Iterator[Callable[[], None]]:
        """Waits until the job may begin, or until `give_up`; the body gets what is called once it is proven."""
        with self._changed:
            self._num_suspects += alone
            while (self._num_unproven if alone else self._num_suspects) and not give_up():
                self._changed.wait(POLL_S)
            self._num_unproven += 1
        unproven = True

        def prove() -> None:
            nonlocal unproven
            with self._changed:
                if unproven:
                    unproven = False
                    self._num_unproven -= 1
                    self._num_suspects -= alone
                    self._changed.notify_all()

        try:
            yield prove
        finally:
            prove()

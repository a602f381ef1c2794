"""Find the job that crashes workers: a job that may have crashed a worker first runs without other new jobs.

A job is unproven until its first token, or its end, is in Redis. When a worker dies, each unproven job is a suspect.
The next attempt of a suspect starts when no other job is unproven, and no other job starts until it is proven. If the
worker dies again, the suspect is the cause, and no other job is blamed.
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
        """Wait until the job may start, or until `give_up`. Yields a function to call once the job is proven."""
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

"""What other threads hand to the one that serves them, and how many of their requests have not ended."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

Command = TypeVar("Command")


class Inbox(Generic[Command]):
    """Commands in the order in which they came. Any thread may put one in; one thread, the owner, takes them out."""

    def __init__(self) -> None:
        # Reentrant: a generator that the garbage collector ends cancels its request wherever a thread is just now.
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        self._is_closed = False
        self._is_nudged = False
        self._num_open = 0
        self.num_submitted = 0  # requests, ever
        self.last_submit = 0.0  # unix seconds; 0 before the first request

    # Any thread

    def submit(self, command: Command) -> bool:
        """Puts a request in, which is open until `end`; False, and it is not in, if the inbox is closed."""
        with self._changed:
            if self._is_closed:
                return False
            self._num_open += 1
            self.num_submitted += 1
            self.last_submit = time.time()
            return self.put(command)

    def put(self, command: Command) -> bool:
        """Puts a command in; False, and it is not in, if the inbox is closed."""
        with self._changed:
            if not self._is_closed:
                self._commands.append(command)
                self._changed.notify_all()
            return not self._is_closed

    def nudge(self) -> None:
        """The owner's wait ends: something has come for it by another way."""
        with self._changed:
            self._is_nudged = True
            self._changed.notify_all()

    def end(self) -> None:
        """One of the requests that were submitted has ended."""
        with self._changed:
            self._num_open -= 1
            if not self._num_open:
                self._changed.notify_all()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """True as soon as every request has ended; False if one has not after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_open, timeout_s)

    @property
    def is_busy(self) -> bool:
        """True while requests have not ended."""
        return self._num_open > 0

    @property
    def is_closed(self) -> bool:
        """True when nothing can be put in any more."""
        return self._is_closed

    def close(self) -> bool:
        """Nothing can be put in any more, and the owner wakes up; False if that was so before."""
        with self._changed:
            was_open, self._is_closed = not self._is_closed, True
            self._changed.notify_all()
            return was_open

    def waiting(self) -> list[Command]:
        """What is in it just now, and stays there."""
        with self._changed:
            return list(self._commands)

    # The owner

    def __bool__(self) -> bool:
        """True if there are commands."""
        return bool(self._commands)

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns as soon as there are commands, after a nudge, when the inbox is closed, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands) or self._is_closed or self._is_nudged, timeout_s)
            self._is_nudged = False

    def take(self, most: int | None = None) -> list[Command]:
        """Takes everything out, or the first `most` commands. Never waits."""
        if not self._commands:
            return []
        with self._changed:
            number = len(self._commands) if most is None else min(most, len(self._commands))
            return [self._commands.popleft() for _ in range(number)]

"""The inbox: it passes commands from other threads to the thread that runs them, and counts unfinished requests."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Generic, TypeVar

Command = TypeVar("Command")


class Inbox(Generic[Command]):
    """Commands in order of arrival.

    Any thread may add commands. Only one thread, the owner, may remove them.
    """

    def __init__(self) -> None:
        # Reentrant, because the garbage collector may close a generator on any thread, which cancels its request.
        self._changed = threading.Condition()
        self._commands: deque[Command] = deque()
        self._is_closed = False
        self._is_nudged = False
        self._num_open = 0
        self.num_submitted = 0  # total number of requests
        self.last_submit = 0.0  # Unix seconds; 0 before the first request

    # Any thread

    def submit(self, command: Command) -> bool:
        """Add a request, which counts as unfinished until `end` is called.

        Return False without adding the request if the inbox is closed.
        """
        with self._changed:
            if self._is_closed:
                return False
            self._num_open += 1
            self.num_submitted += 1
            self.last_submit = time.time()
            return self.put(command)

    def put(self, command: Command) -> bool:
        """Add a command. Return False without adding the command if the inbox is closed."""
        with self._changed:
            if not self._is_closed:
                self._commands.append(command)
                self._changed.notify_all()
            return not self._is_closed

    def nudge(self) -> None:
        """Wake the owner. Call this method if the owner has work that is not in the inbox."""
        with self._changed:
            self._is_nudged = True
            self._changed.notify_all()

    def end(self) -> None:
        """Record that a request has finished."""
        with self._changed:
            self._num_open -= 1
            if not self._num_open:
                self._changed.notify_all()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until every request has finished. Return False if a request is still unfinished after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_open, timeout_s)

    @property
    def is_busy(self) -> bool:
        """Whether any requests are unfinished."""
        return self._num_open > 0

    @property
    def is_closed(self) -> bool:
        """Whether the inbox rejects new commands."""
        return self._is_closed

    def close(self) -> bool:
        """Reject further commands and wake the owner. Return False if the inbox was already closed."""
        with self._changed:
            was_open, self._is_closed = not self._is_closed, True
            self._changed.notify_all()
            return was_open

    def waiting(self) -> list[Command]:
        """Return the waiting commands without removing them."""
        with self._changed:
            return list(self._commands)

    # The owner

    def __bool__(self) -> bool:
        """Return whether any commands are waiting."""
        return bool(self._commands)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until a command arrives, `nudge` is called, or the inbox is closed.

        Wait for at most `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands) or self._is_closed or self._is_nudged, timeout_s)
            self._is_nudged = False

    def take(self, most: int | None = None) -> list[Command]:
        """Remove and return all commands, or only the first `most` commands. This method never waits."""
        if not self._commands:
            return []
        with self._changed:
            number = len(self._commands) if most is None else min(most, len(self._commands))
            return [self._commands.popleft() for _ in range(number)]

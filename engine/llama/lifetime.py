"""What others use, and what must not be freed under them."""

from __future__ import annotations

import threading
from types import TracebackType

from cellama.engine.errors import EngineStopped


class Lifetime:
    """Counts who uses something just now; its end waits for them, and refuses those who come later. Any thread.

    with lifetime:  # raises EngineStopped after the end
        ...         # it is there
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._num_users = 0
        self._ended = False
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            if self._ended:
                raise EngineStopped(f"{self._what} is unloaded and can't be used any more; load it again")
            self._num_users += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._num_users -= 1
            if self._ended:
                self._changed.notify_all()

    def end(self, timeout_s: float) -> bool:
        """Refuses users from now on; True once the last one has gone, False if that takes longer. Idempotent."""
        with self._changed:
            self._ended = True
            return self._changed.wait_for(lambda: not self._num_users, timeout_s)

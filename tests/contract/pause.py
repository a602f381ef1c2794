"""An engine that waits in the midst of a request, so that what a test needs to run does so on any machine."""

from __future__ import annotations

import threading

from cellama.engine import Event, Text

PATIENCE_S = 120


class Pause:
    """A listener of a request: holds the engine up after so many texts, until the test goes on."""

    def __init__(self, count: int) -> None:
        self.reached, self.opened, self._left = threading.Event(), threading.Event(), count

    def __call__(self, event: Event) -> None:
        self._left -= isinstance(event, Text)
        if self._left == 0:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)

"""Stop an engine in the middle of a request, so that a test can act at that moment on any machine."""

from __future__ import annotations

import threading

from cellama.engine import Event, Text

PATIENCE_S = 120


class Hold:
    """A listener that blocks the engine thread after a number of texts, until the test releases it."""

    def __init__(self, count: int = 1) -> None:
        self.reached, self.opened, self._left = threading.Event(), threading.Event(), count

    def __call__(self, event: Event) -> None:
        self._left -= isinstance(event, Text)
        if self._left == 0:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)

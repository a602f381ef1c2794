"""The thread that reads states, one after another: a request may wait for each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from .catalog import Catalog
from .counters import Tally
from .files.folder import touch
from .files.state_file import read_state
from .states import KeptState, Match, Miss

log = logging.getLogger(__name__)

CLOSE_S = 5.0
OnLoaded = Callable[[KeptState | None], None]


class Reader:
    """What is asked of it is answered once, with None for a miss, also while it closes."""

    def __init__(self, catalog: Catalog, tally: Tally, most_bytes: int) -> None:
        self._catalog, self._tally, self._most_bytes = catalog, tally, most_bytes
        self._asked: SimpleQueue[tuple[Match, OnLoaded] | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cellama-kv-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load(self, match: Match, on_loaded: OnLoaded) -> None:
        """Reads it in its turn."""
        with self._closing:
            if not self._is_closed:
                self._asked.put((match, on_loaded))
                return
        on_loaded(None)

    def close(self) -> None:
        """What was asked is answered with None, but for what is being read; the thread ends."""
        with self._closing:
            self._is_closed = True
            self._asked.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._catalog.refresh()  # so that the first request need not wait for it
        except Exception:  # the boundary of the thread
            log.exception("the folder of KV states could not be looked at")
        while (asked := self._asked.get()) is not None:
            match, on_loaded = asked
            try:
                state = None if self._is_closed else self._read(match)
            except Exception:  # the boundary of the thread
                log.exception("a KV state could not be read; it is computed")
                state = None
            try:
                on_loaded(state)
            except Exception:
                log.exception("a KV state that was read could not be handed over")
            if state is not None:
                touch(self._catalog.path_of(match.key))  # last: it waits for what is being written

    def _read(self, match: Match) -> KeptState | None:
        path = self._catalog.path_of(match.key)
        started = time.perf_counter()
        state = read_state(path, self._most_bytes)
        if isinstance(state, Miss):
            self._tally.miss(state)
            self._catalog.refuse(match.key)
            if state is Miss.DAMAGED:
                log.warning("the KV state %s was damaged; it is computed again", path)
                path.unlink(missing_ok=True)
            return None
        self._tally.hit(match.num_bytes, time.perf_counter() - started)
        self._catalog.touch(match.key)
        return state

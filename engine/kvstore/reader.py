"""The thread that reads states, one after another: a request may wait for each. It waits for no write."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

from .catalog import StateCatalog
from .counters import Tally
from .folder import Folder, touch
from .spare import Spare
from .state_file import read_state
from .states import KeptState, Miss, StateMatch

log = logging.getLogger(__name__)

CLOSE_S = 5.0
COUNT_S = 10.0  # between two counts of what the folder holds
REST_S = 0.25  # without work, before memory is got in advance: then a request that comes next hardly meets that
OnLoaded = Callable[[KeptState | None], None]


class StateReader:
    """What is asked of it is answered once, with None for a miss, also while it closes."""

    def __init__(self, folder: Folder, catalog: StateCatalog, tally: Tally, spare_bytes: int) -> None:
        """`spare_bytes`: of memory that waits for the next state."""
        self._folder, self._catalog, self._tally = folder, catalog, tally
        self.used_bytes = 0  # of all states in the folder, as it was COUNT_S ago at most
        self.spare = Spare(spare_bytes)
        self._is_busy = False
        self._asked: SimpleQueue[tuple[StateMatch, OnLoaded] | Literal["rest"] | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cellama-kv-reader", daemon=True)
        self._used: SimpleQueue[Path | None] = SimpleQueue()
        self._toucher = threading.Thread(target=self._touch, name="cellama-kv-toucher", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._toucher.start()

    def load(self, match: StateMatch, on_loaded: OnLoaded) -> None:
        """Reads it in its turn."""
        with self._closing:
            if not self._is_closed:
                self._asked.put((match, on_loaded))
                return
        on_loaded(None)

    def note_busy(self, busy: bool) -> None:
        """The engine works, or has nothing to do: then there is time to get memory for what will be asked for."""
        if self._is_busy and not busy and self.spare.is_lacking:
            self._asked.put("rest")
        self._is_busy = busy

    def close(self) -> None:
        """What was asked is answered with None, but for what is being read; the thread ends."""
        with self._closing:
            self._is_closed = True
            self._asked.put(None)
        self._thread.join(CLOSE_S)
        self._used.put(None)
        self._toucher.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._catalog.refresh()  # so that the first request need not wait for it
            self.spare.expect(self._catalog.largest)
        except Exception:  # the boundary of the thread
            log.exception("the folder of KV states could not be looked at")
        pause_s: float | None = 0.0
        while True:
            try:
                asked = self._asked.get(timeout=pause_s)
            except Empty:
                self._prepare()
                pause_s = None
                continue
            if asked is None:
                return
            pause_s = None if self._is_busy or not self.spare.is_lacking else REST_S
            if asked == "rest":
                continue
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
                self._used.put(self._catalog.path_of(match.key))
            del state, asked, on_loaded  # its memory

    def _prepare(self) -> None:
        try:
            while not self._is_busy and self._asked.empty() and self.spare.touch_more():
                pass
        except Exception:  # no memory, for instance; the boundary of the thread
            log.exception("no memory could be had for KV states in advance")

    def _touch(self) -> None:
        """A thread of its own: to note that a file was used waits for what is being written. It counts them, too."""
        count_at = 0.0
        while True:
            if (now := time.monotonic()) >= count_at:
                with contextlib.suppress(OSError, ValueError):
                    self.used_bytes = sum(file.num_bytes for file in self._folder.states())
                count_at = now + COUNT_S
            try:
                path = self._used.get(timeout=max(0.0, count_at - now))
            except Empty:
                continue
            if path is None:
                return
            touch(path)

    def _read(self, match: StateMatch) -> KeptState | None:
        path = self._catalog.path_of(match.key)
        started = time.perf_counter()
        state = read_state(path, self._folder.quota_bytes, self.spare.take)
        if isinstance(state, Miss):
            self._tally.miss(state)
            self._catalog.refuse(match.key)
            if state is Miss.DAMAGED:
                log.warning("the KV state %s was damaged; it is computed again", path)
                path.unlink(missing_ok=True)
            return None
        self._tally.hit(match.num_bytes, time.perf_counter() - started)
        return state

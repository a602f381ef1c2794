"""The thread that reads states, one after another. A request may wait for each, so it waits for no write."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from .benefit import RunningRate
from .catalog import StateCatalog
from .counters import StoreCounters
from .folder import Folder
from .state_file import read_state
from .states import KeptState, Miss, StateMatch
from .warm_memory import WarmMemory

log = logging.getLogger(__name__)

CLOSE_S = 5.0  # then a disk that does not answer is left behind, with the thread
REST_S = 0.25  # without work before memory is warmed: a request that comes next hardly meets that
RATE_GUESS = 400e6  # bytes/s, with verifying: a common NVMe disk
RATE_GUESS_BYTES = 32 << 20  # the weight of the guess: a state or two
RATE_MEMORY_BYTES = 1 << 30  # what was read before these hardly counts

OnLoaded = Callable[[KeptState | None], None]


class StateReader:
    """Answers each request once, with None for a miss, also while it closes."""

    def __init__(
        self,
        folder: Folder,
        catalog: StateCatalog,
        counters: StoreCounters,
        warm_bytes: int,
        on_used: Callable[[str], object],
    ) -> None:
        """`warm_bytes` of memory wait for the next states. `on_used` is called with the key of each file read."""
        self._folder, self._catalog, self._counters, self._on_used = folder, catalog, counters, on_used
        self.rate = RunningRate(RATE_GUESS, RATE_GUESS_BYTES, RATE_MEMORY_BYTES)  # bytes/s
        self.memory = WarmMemory(warm_bytes)
        self.is_busy = False  # the engine works: no memory is warmed meanwhile
        self._asked: SimpleQueue[tuple[StateMatch, OnLoaded] | None] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cellama-kv-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load(self, match: StateMatch, on_loaded: OnLoaded) -> None:
        """Read a state in its turn."""
        if self._is_closed:
            on_loaded(None)
        else:
            self._asked.put((match, on_loaded))

    def close(self) -> None:
        """Answer what was asked with None, except for what is being read, and end the thread."""
        self._is_closed = True
        self._asked.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._catalog.refresh()  # so that the first request need not wait for it
            self.memory.expect(self._catalog.largest)
        except Exception:  # the boundary of the thread
            log.exception("kv store: can't look at the directory")
        self._warm_memory()
        while True:
            try:
                asked = self._asked.get(timeout=REST_S if self.memory.is_lacking else None)
            except Empty:
                self._warm_memory()
                continue
            if asked is None:
                return
            self._answer(*asked)
            del asked  # its memory

    def _answer(self, match: StateMatch, on_loaded: OnLoaded) -> None:
        state = None
        try:
            state = None if self._is_closed else self._read(match)
        except Exception:  # the boundary of the thread
            log.exception("kv store: can't read a state; it is computed")
        try:
            on_loaded(state)
        except Exception:
            log.exception("kv store: can't hand over a state that was read")
        if state is not None:
            self._on_used(match.head.key)

    def _warm_memory(self) -> None:
        """Get all pieces of memory that are lacking, until there is something better to do."""
        try:
            while self.memory.is_lacking and not self._has_work():
                self.memory.add_piece(must_stop=self._has_work)
        except Exception:  # no memory, for instance; the boundary of the thread
            log.exception("kv store: can't provide memory in advance; it is no longer tried")
            self.memory = WarmMemory(0)

    def _has_work(self) -> bool:
        return self.is_busy or not self._asked.empty()

    def _read(self, match: StateMatch) -> KeptState | None:
        path = self._catalog.path_of(match.head.key)
        started = time.perf_counter()
        state = read_state(path, self._folder.quota_bytes, self.memory.take)
        if isinstance(state, Miss):
            self._counters.add(misses=1)
            self._catalog.refuse(match.head.key)
            if state is Miss.DAMAGED:
                log.warning("kv store: %s is damaged; the state is computed again", path)
                path.unlink(missing_ok=True)
            return None
        self._counters.add(hits=1, read_bytes=match.head.num_bytes)
        self.rate.add(match.head.num_bytes, time.perf_counter() - started)
        return state

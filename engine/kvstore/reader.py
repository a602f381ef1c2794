"""The thread that reads states, and the memory that the thread prepares for these states.

Requests wait for reads, so this thread never waits for a write.
"""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from cellama.config.logging import event_logger

from .benefit import RunningRate
from .catalog import StateCatalog
from .directory import StateDirectory
from .state_file import new_memory, read_state
from .states import Miss, StateMatch, StoreCounters, StoredState

log = event_logger(__name__)

CLOSE_TIMEOUT_S = 5.0  # seconds; a thread that still waits for its disk after this time is abandoned
IDLE_S = 0.25  # seconds without a read before memory is prepared, so that it rarely delays the next read
INITIAL_RATE = 400e6  # bytes/s including verification, as on a common NVMe disk
INITIAL_RATE_BYTES = 32 << 20  # weight of the initial rate: one or two states
RATE_MEMORY_BYTES = 1 << 30  # bytes after which a read has little weight
TOUCH_BYTES = 1 << 18  # bytes touched at once, which takes much less than 1 ms if the host has the memory
MAX_BUFFERS = 4  # number of buffers, for states of requests that arrive at the same time
MAX_OVERSIZE = 4  # a buffer serves states of a quarter of its size or more; the rest is returned to the system

OnLoaded = Callable[[StoredState | None], None]


class StateReader:
    """Reads states one after another.

    `on_loaded` is called exactly once for each requested state, with None if the file has no usable state.
    """

    def __init__(
        self,
        directory: StateDirectory,
        catalog: StateCatalog,
        counters: StoreCounters,
        warm_bytes: int,
        on_used: Callable[[str], object],
    ) -> None:
        """Prepare up to `warm_bytes` bytes of memory for future reads.

        `on_used` is called with the key of each file that has been read.
        """
        self._directory, self._catalog, self._counters, self._on_used = directory, catalog, counters, on_used
        self.rate = RunningRate(INITIAL_RATE, INITIAL_RATE_BYTES, RATE_MEMORY_BYTES)  # bytes/s
        self.memory = WarmMemory(warm_bytes)
        self.is_busy = False  # while the engine computes, no memory is prepared
        self._requests: SimpleQueue[tuple[StateMatch, OnLoaded] | None] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cellama-kv-reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load(self, match: StateMatch, on_loaded: OnLoaded) -> None:
        """Queue a state for reading."""
        if self._is_closed:
            on_loaded(None)
        else:
            self._requests.put((match, on_loaded))

    def close(self) -> None:
        """Finish the current read, answer all queued requests with None, and stop the thread."""
        self._is_closed = True
        self._requests.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._catalog.refresh()  # so that the first request does not wait for the scan
            self.memory.expect(self._catalog.max_file_bytes)
        except Exception:  # the boundary of the thread
            log.exception("KV state directory scan failed")
        self._warm_memory()
        while True:
            try:
                request = self._requests.get(timeout=IDLE_S if self.memory.needs_buffer else None)
            except Empty:
                self._warm_memory()
                continue
            if request is None:
                return
            self._answer(*request)
            del request  # frees the memory of the state

    def _answer(self, match: StateMatch, on_loaded: OnLoaded) -> None:
        state = None
        try:
            state = None if self._is_closed else self._read(match)
        except Exception:  # the boundary of the thread
            log.exception("KV state read failed", detail="unexpected error; the state's tokens will be recomputed")
        try:
            on_loaded(state)
        except Exception:
            log.exception("KV state not delivered", detail="unexpected error in the engine's callback")
        if state is not None:
            self._on_used(match.head.key)

    def _warm_memory(self) -> None:
        """Prepare buffers until enough are ready. Stop early if the engine is computing or a request is waiting."""
        try:
            while self.memory.needs_buffer and not self._has_work():
                self.memory.add_buffer(must_stop=self._has_work)
        except Exception:  # out of memory, for example; the boundary of the thread
            log.exception("preallocation for KV states disabled", detail="the memory can't be allocated")
            self.memory = WarmMemory(0)

    def _has_work(self) -> bool:
        return self.is_busy or not self._requests.empty()

    def _read(self, match: StateMatch) -> StoredState | None:
        path = self._catalog.path_of(match.head.key)
        started = time.perf_counter()
        state = read_state(path, self._directory.quota_bytes, self.memory.take)
        if isinstance(state, Miss):
            self._counters.add(misses=1)
            self._catalog.reject(match.head.key)
            if state is Miss.DAMAGED:
                log.warning("damaged KV state removed", path=str(path), detail="the state's tokens will be recomputed")
                path.unlink(missing_ok=True)
            return None
        self._counters.add(hits=1, read_bytes=match.head.num_bytes)
        self.rate.add(match.head.num_bytes, time.perf_counter() - started)
        return state


class WarmMemory:
    """Memory that is requested from the operating system before states are read into it.

    Some virtual machines provide memory only when it is first touched. Touching 40 MB then takes up to 20 times as long
    as reading 40 MB from the page cache (ADR 014). Each buffer is as large as the largest state seen so far. Only one
    thread may call the methods. Any thread may read `num_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        """Limit the total size of all buffers to `max_bytes`.

        Buffers are used only on Linux, where the unused part of a buffer can be returned to the system.
        """
        self._max_bytes = max_bytes if sys.platform == "linux" else 0
        self._buffer_bytes = 0
        self._buffers: list[mmap.mmap] = []
        self._unfinished: mmap.mmap | None = None
        self._touched = 0  # bytes of the unfinished buffer that have been touched

    @property
    def num_bytes(self) -> int:
        return self._touched + sum(map(len, list(self._buffers)))

    @property
    def needs_buffer(self) -> bool:
        """Whether the limits allow another buffer."""
        num_buffers = len(self._buffers)
        return 0 < self._buffer_bytes * (num_buffers + 1) <= self._max_bytes and num_buffers < MAX_BUFFERS

    def expect(self, num_bytes: int) -> None:
        """Record that a state can have this size. Buffers that are too small for such a state are discarded."""
        if self._buffer_bytes < num_bytes <= self._max_bytes:
            self._buffer_bytes, self._buffers = num_bytes, []
            self._unfinished, self._touched = None, 0

    def take(self, num_bytes: int) -> mmap.mmap:
        """Return memory of this size, from a prepared buffer if one has a suitable size."""
        self.expect(num_bytes)
        if not self._buffers or not num_bytes <= self._buffer_bytes <= MAX_OVERSIZE * num_bytes:
            return new_memory(num_bytes)
        buffer = self._buffers.pop()
        buffer.resize(num_bytes)
        return buffer

    def add_buffer(self, must_stop: Callable[[], bool]) -> None:
        """Prepare another buffer. Stop early if `must_stop` returns True.

        The next call continues with the same buffer.
        """
        buffer = self._unfinished = self._unfinished or new_memory(self._buffer_bytes)
        with open("/dev/zero", "rb", buffering=0) as zeros:  # reading releases the GIL, unlike writing from Python
            while self._touched < len(buffer):
                if must_stop():
                    return
                self._touched += zeros.readinto(memoryview(buffer)[self._touched : self._touched + TOUCH_BYTES])
        self._buffers.append(buffer)
        self._unfinished, self._touched = None, 0

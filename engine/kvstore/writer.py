"""The thread that writes states, one after another, and notes which files were used."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from cellama.engine.system.threads import give_way

from .catalog import MAX_SLACK, StateCatalog
from .counters import StoreCounters
from .eviction import FolderFull
from .folder import Folder, is_pinned, touch
from .save_queue import SaveOffer, SaveQueue
from .state_file import file_bytes, write_state
from .states import KeptState

log = logging.getLogger(__name__)

OFF_S = 60.0  # between two attempts to write to a directory that refuses: each hashes a state in vain
CHORES_S = 10.0  # so old may the count of bytes be, and the time of last use of a file that was read
CLOSE_S = 5.0  # then a disk that does not answer is left behind, with the thread
_OF_THE_FILE = {errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTEMPTY}


class StoreClosed(Exception):
    """The store closes, so a file is given up."""


class StateWriter:
    """Writes what the queue gives, until that is closed."""

    def __init__(
        self,
        folder: Folder,
        catalog: StateCatalog,
        queue: SaveQueue,
        counters: StoreCounters,
        clock: Callable[[], float],
    ) -> None:
        self._folder, self._catalog, self._queue, self._counters = folder, catalog, queue, counters
        self._clock = clock
        self.used_bytes = 0  # of all states in the directory, at most CHORES_S ago
        self._count_at = clock()
        self._off_until = float("-inf")
        self._is_prepared = False
        self._is_failing = False  # since the last state that was written
        self._used: deque[str] = deque()  # keys of files that were read
        self._thread = threading.Thread(target=self._run, name="cellama-kv-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended, or the disk does not answer."""
        self._thread.join(CLOSE_S)

    @property
    def is_off(self) -> bool:
        """True while the directory is left alone."""
        return self._clock() < self._off_until

    def note_used(self, key: str) -> None:
        """A file was read. This thread notes it, because that waits for the fsync of files that are written."""
        self._used.append(key)

    def _run(self) -> None:
        give_way()
        self._prepare()
        while not self._queue.is_closed:
            self._do_chores()
            if (offer := self._queue.take(CHORES_S)) is not None:
                self._write(offer)
            del offer  # its memory
        self._touch_used()

    def _do_chores(self) -> None:
        self._touch_used()
        if self._clock() >= self._count_at:
            with contextlib.suppress(OSError, ValueError):
                self.used_bytes = sum(file.num_bytes for file in self._folder.states())
            self._count_at = self._clock() + CHORES_S

    def _touch_used(self) -> None:
        while self._used:
            touch(self._catalog.path_of(self._used.popleft()))

    def _write(self, offer: SaveOffer) -> None:
        started = time.thread_time()  # what the disk takes is not taken from the engine
        written = False
        try:
            state = offer.make()
            written = state is not None and self._save(state)
        except Exception:  # the boundary of the thread
            log.exception("kv store: can't write a state; it is computed again when it is needed")
        finally:
            self._counters.add(drops=not written)
            self._counters.evictions = self._folder.num_evictions
            self._queue.done(written, time.thread_time() - started)

    def _save(self, state: KeptState) -> bool:
        """Write a state; return False if it is not written."""
        if not self.is_off and not self._is_prepared:
            self._prepare()
        if self.is_off or self._is_kept(state):
            return False
        try:
            self._write_file(state)
        except (StoreClosed, FolderFull) as reason:
            log.debug("kv store: a state is not written: %s", reason)
            return False
        except OSError as error:
            log.debug("kv store: a state is not written: %s", error)
            if error.errno not in _OF_THE_FILE:
                self._switch_off(error)
            return False
        self._is_failing = False
        return True

    def _is_kept(self, state: KeptState) -> bool:
        """True if the directory has the state, or a longer one that can be cut to it and is not much more to read."""
        match = self._catalog.longest(state.seed, state.tokens)
        count = len(state.tokens)
        if match is None or match.usable(count) < count or match.head.num_bytes > MAX_SLACK * file_bytes(state):
            return False
        touch(self._catalog.path_of(match.head.key))
        return True

    def _write_file(self, state: KeptState) -> None:
        self._touch_used()  # before older files are evicted
        replaced = self._catalog.replaced_by(state, file_bytes(state))
        file = self._folder.create(self._catalog.directory, file_bytes(state))
        try:
            head = write_state(file.descriptor, state, self._stop_if_closed)
            file.publish(head.key)
        finally:
            file.close()
        self._counters.add(saves=1, written_bytes=head.num_bytes)
        self._catalog.add(head)
        self._folder.remove(path for path in map(self._catalog.path_of, replaced) if not is_pinned(path))

    def _stop_if_closed(self) -> None:
        if self._queue.is_closed:
            raise StoreClosed("the store closes")

    def _prepare(self) -> None:
        try:
            self._folder.prepare(self._catalog.directory)
            self._is_prepared = True
        except (OSError, ValueError) as error:  # a zero byte in a path is a ValueError
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        level = logging.DEBUG if self._is_failing else logging.WARNING
        log.log(level, "kv store: can't write to %s: %s; retried every %.0f s", self._folder.root, error, OFF_S)
        self._is_prepared, self._is_failing = False, True
        self._off_until = self._clock() + OFF_S  # last: whoever sees it finds it logged

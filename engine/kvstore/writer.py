"""The thread that writes states: one after another, in chunks, giving way to the engine."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable

from cellama.engine.system.low_priority import give_way

from .catalog import MAX_SLACK, StateCatalog
from .counters import Drop, Tally
from .eviction import FolderFull
from .folder import Folder, is_pinned, touch
from .save_queue import Dropped, Offer, SaveQueue
from .state_file import file_bytes, write_state
from .states import KeptState, StateHead

log = logging.getLogger(__name__)

OFF_S = 30.0  # how long a folder that refused is left alone; twice as long each time that it refuses again
MOST_OFF_S = 600.0
CLOSE_S = 5.0
_OF_THE_FILE = {errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTEMPTY}


class StateWriter:
    """Takes from the queue until that is closed."""

    def __init__(
        self, folder: Folder, catalog: StateCatalog, queue: SaveQueue, tally: Tally, clock: Callable[[], float]
    ) -> None:
        self._folder, self._catalog, self._queue, self._tally = folder, catalog, queue, tally
        self._clock = clock
        self._off_until, self._off_s = float("-inf"), OFF_S
        self._is_prepared = False
        self._charged = 0.0  # seconds of this thread that the queue knows of
        self._thread = threading.Thread(target=self._run, name="cellama-kv-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """The thread has ended, or the disk does not answer: then it is left behind."""
        self._thread.join(CLOSE_S)

    @property
    def is_off(self) -> bool:
        """True while the folder is left alone."""
        return self._clock() < self._off_until

    def prepare(self) -> None:
        """The folder is ready, or left alone for a while."""
        try:
            self._folder.prepare(self._catalog.directory)
            self._is_prepared = True
        except (OSError, ValueError) as error:  # a zero byte in a path is a ValueError
            self._switch_off(error)

    def _run(self) -> None:
        give_way()
        self.prepare()
        while (offer := self._queue.take()) is not None:
            started = self._charged = time.thread_time()  # what the disk takes is not taken from the engine
            written = False
            try:
                written = self._save(offer)
            except Dropped as dropped:
                self._tally.drop(dropped.reason)
            except Exception:  # the boundary of the thread
                log.exception("a KV state could not be written; it is computed again when it is needed")
                self._tally.drop(Drop.ERROR)
            finally:
                now = time.thread_time()
                self._queue.done(written, now - self._charged, now - started)
                del offer  # its memory

    def _save(self, offer: Offer) -> bool:
        state = offer.state if isinstance(offer.state, KeptState) else offer.state()
        if state is None:
            raise Dropped(Drop.INVALID)
        if not self.is_off and not self._is_prepared:
            self.prepare()
        if self.is_off:
            raise Dropped(Drop.OFF)
        try:
            self._look_for_equal(state)
            replaced = self._catalog.replaced_by(state, file_bytes(state))
            head = self._write(state)
            self._catalog.add(head)
            self._folder.remove(path for path in map(self._catalog.path_of, replaced) if not is_pinned(path))
        except FolderFull as full:
            log.debug("a KV state is not written: %s", full)
            raise Dropped(Drop.QUOTA) from full
        except ValueError as error:
            log.warning("what was offered is no KV state: %s", error)
            raise Dropped(Drop.INVALID) from error
        except OSError as error:
            self._tally.count("write_errors")
            if error.errno not in _OF_THE_FILE:
                self._switch_off(error)
            raise Dropped(Drop.ERROR) from error
        self._off_s = OFF_S
        return True

    def _look_for_equal(self, state: KeptState) -> None:
        """Dropped if the folder has it, or a longer one that can be cut to it and is not much more to read."""
        match = self._catalog.longest(state.seed, state.tokens)
        count = len(state.tokens)
        if match and match.usable(count) == count and match.num_bytes <= MAX_SLACK * file_bytes(state):
            touch(self._catalog.path_of(match.key))
            raise Dropped(Drop.KEPT)

    def _write(self, state: KeptState) -> StateHead:
        started = self._clock()
        file = self._folder.create(self._catalog.directory, file_bytes(state))
        try:
            head = write_state(file.descriptor, state, self._pause)
            file.publish(head.key)
        finally:
            file.close()
        self._tally.save(head.num_bytes, self._clock() - started)
        return head

    def _pause(self) -> None:
        """After each chunk."""
        now = time.thread_time()
        spent_s, self._charged = now - self._charged, now
        self._queue.pause(spent_s)

    def _switch_off(self, error: Exception) -> None:
        self._is_prepared = False
        self._tally.count("outages")
        log.warning("no KV states are written for %.0f s: %s", self._off_s, error)
        self._off_until = self._clock() + self._off_s  # last: who sees it finds it counted and told
        self._off_s = min(2 * self._off_s, MOST_OFF_S)

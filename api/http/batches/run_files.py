"""The files of a run: its directory on this machine, and the parts of its output in the store. All of it blocks."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cellama.api.http.files.store import READ_BYTES, FileStore, blocks_of, write_new

RUNS = "runs"
OLD_S = 86_400  # a day without a change: the batch has most likely ended
LEAST_S, MOST_S = 1.0, 30.0  # between two parts: a gateway that dies loses at most half a minute of work
SHARE = 0.1  # of the run's time between two parts: a gateway that dies early loses a tenth of its work


def folder_of(store: FileStore, batch_id: str) -> Path:
    """Return the directory of a run on this machine."""
    return store.work_dir / RUNS / batch_id


def clear(store: FileStore, batch_id: str) -> None:
    """Delete what is left of a run that has ended: its directory here, and all parts in the store. Raises OSError."""
    shutil.rmtree(folder_of(store, batch_id), ignore_errors=True)
    store.delete_folder(f"parts/{batch_id}")


def old_runs(store: FileStore, now: float) -> list[str]:
    """Return the batches whose directories here have not changed for a day; `now` is in unix s."""
    return [folder.name for folder in (store.work_dir / RUNS).glob("*") if _changed_at(folder) < now - OLD_S]


def _changed_at(folder: Path) -> float:
    times = []
    for path in (folder, *folder.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times, default=0.0)


class Parts:
    """Parts of the output of one batch, for a gateway on another machine. The record of the batch names them in their
    order; a part that no record names counts for nothing. Methods raise OSError."""

    def __init__(
        self,
        store: FileStore,
        batch_id: str,
        names: Sequence[str] = (),
        num_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The parts of these names have `num_bytes` of the output. `clock` is for tests."""
        self.names = list(names)
        self.num_bytes = num_bytes
        self._store = store
        self._batch_id = batch_id
        self._clock = clock
        self._started_at = self._saved_at = clock()

    def fetch(self, output: Path) -> None:
        """Write the output that the parts have."""
        fresh = output.with_name(f"{output.name}.part")
        write_new(fresh, (block for name in self.names for block in blocks_of(self._store.open(name))))
        self.num_bytes = fresh.stat().st_size
        fresh.replace(output)

    def is_due(self) -> bool:
        """Return whether it is time for the next part. True counts as a part."""
        now = self._clock()
        if now - self._saved_at < min(MOST_S, max(LEAST_S, SHARE * (now - self._started_at))):
            return False
        self._saved_at = now
        return True

    def save(self, output: Path) -> bool:
        """Store what the output has gained as a part; return False if that is nothing.

        Called between two turns of the run, when the output has whole lines only.
        """
        size = output.stat().st_size if output.exists() else 0
        if size <= self.num_bytes:
            return False
        local = output.with_name("part.upload")
        write_new(local, _blocks_between(output, self.num_bytes, size))
        self.names.append(f"parts/{self._batch_id}/{len(self.names):06}-{uuid.uuid4().hex}")
        self._store.put(local, self.names[-1])
        local.unlink()
        self.num_bytes = size
        return True


def _blocks_between(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while start < end and (block := file.read(min(end - start, READ_BYTES))):
            start += len(block)
            yield block

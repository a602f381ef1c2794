"""Manage a run's directory on this machine, and the parts of its output in the store.

All functions block the calling thread.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cellama.api.http.files.store import READ_BYTES, FileStore, blocks_of, write_new

RUNS = "runs"
OLD_S = 86_400  # a directory without a change for a day most likely belongs to a batch that has ended
MIN_PART_S, MAX_PART_S = 1.0, 30.0  # between two parts, so that a gateway that dies loses at most 30 s of work
PART_SHARE = 0.1  # share of the run's duration between two parts: a gateway that dies loses a tenth of its work


def run_directory(store: FileStore, batch_id: str) -> Path:
    """Return a run's directory on this machine."""
    return store.work_dir / RUNS / batch_id


def delete_run(store: FileStore, batch_id: str) -> None:
    """Delete the directory and the stored parts of a run that has ended. Raises OSError."""
    shutil.rmtree(run_directory(store, batch_id), ignore_errors=True)
    store.delete_directory(f"parts/{batch_id}")


def abandoned_runs(store: FileStore, now: float) -> list[str]:
    """Return the ids of batches whose directories on this machine have not changed for a day.

    `now` is in Unix seconds.
    """
    return [path.name for path in (store.work_dir / RUNS).glob("*") if _changed_at(path) < now - OLD_S]


def _changed_at(directory: Path) -> float:
    times = []
    for path in (directory, *directory.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times, default=0.0)


class Parts:
    """The stored parts of a batch's output, which allow a gateway on another machine to take over the batch.

    The batch's record lists the names of its stored parts in order. Stored parts that are not listed are ignored. All
    methods may raise OSError.
    """

    def __init__(
        self,
        store: FileStore,
        batch_id: str,
        names: Sequence[str] = (),
        num_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the list of stored parts, which contain `num_bytes` bytes of the output in total.

        Tests may replace `clock`.
        """
        self.names = list(names)
        self.num_bytes = num_bytes
        self._store = store
        self._batch_id = batch_id
        self._clock = clock
        self._started_at = self._saved_at = clock()

    def download(self, output: Path) -> None:
        """Assemble the output file from the stored parts."""
        fresh = output.with_name(f"{output.name}.part")
        write_new(fresh, (block for name in self.names for block in blocks_of(self._store.open(name))))
        self.num_bytes = fresh.stat().st_size
        fresh.replace(output)

    def is_due(self) -> bool:
        """Return whether the next part should be stored now.

        A call that returns True restarts the interval between parts.
        """
        now = self._clock()
        if now - self._saved_at < min(MAX_PART_S, max(MIN_PART_S, PART_SHARE * (now - self._started_at))):
            return False
        self._saved_at = now
        return True

    def save(self, output: Path) -> bool:
        """Store the latest output as a new part. Return False if there is no new output.

        Call this method between two iterations of the run, when the output contains only complete lines.
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

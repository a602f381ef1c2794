"""The files of a run: its directory on this machine, and the parts of its output in the store. All of it blocks."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from cellama.api.http.files.store import READ_BYTES, FileStore, blocks_of, open_new

RUNS = "runs"
OLD_S = 86_400  # since the last change: its batch has most likely ended
LEAST_S, MOST_S = 1.0, 30.0  # between parts
SHARE = 0.1  # of the time that the run has taken


def folder_of(store: FileStore, batch_id: str) -> Path:
    """The folder of a run on this machine."""
    return store.work_dir / RUNS / batch_id


def parts_of(batch_id: str) -> str:
    """What the names of its parts in the store begin with."""
    return f"parts/{batch_id}"


def clear(store: FileStore, batch_id: str) -> None:
    """Nothing of a run that has ended is there any more: neither its folder here, nor parts, whoever has put them
    there. Raises OSError."""
    shutil.rmtree(folder_of(store, batch_id), ignore_errors=True)
    store.delete_folder(parts_of(batch_id))


def old_runs(store: FileStore, now: float) -> list[str]:
    """Batches whose folders here have not been written to for a day; `now` is in unix s."""
    return [folder.name for folder in (store.work_dir / RUNS).glob("*") if _changed_at(folder) < now - OLD_S]


def _changed_at(folder: Path) -> float:
    times = []
    for path in (folder, *folder.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times, default=0.0)


class Schedule:
    """When the next part is due. A gateway that dies early loses a tenth of its work, a later one half a minute; and a
    run of a day has no more parts than its record can name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = self._saved_at = clock()

    def is_due(self) -> bool:
        """Each time that it says so counts as a part."""
        now = self._clock()
        if now - self._saved_at < min(MOST_S, max(LEAST_S, SHARE * (now - self._began_at))):
            return False
        self._saved_at = now
        return True


class Parts:
    """The parts of one batch, whose names are in its record, in the order of the output."""

    def __init__(self, store: FileStore, batch_id: str, names: Sequence[str], size: int = 0) -> None:
        """`size` bytes of the output are in the parts that are named."""
        self.names = list(names)
        self._store = store
        self._prefix = parts_of(batch_id)
        self._size = size

    def fetch(self, output: Path) -> None:
        """The output is what the parts have. Raises OSError."""
        fresh = output.with_name(f"{output.name}.part")
        with open_new(fresh) as file:
            for name in self.names:
                for block in blocks_of(self._store.open(name)):
                    file.write(block)
            file.flush()
            os.fsync(file.fileno())
        self._size = fresh.stat().st_size
        fresh.replace(output)

    def save(self, output: Path) -> tuple[list[str], int] | None:
        """The names with that of a new part, and the bytes that they have, for the record: the part counts once that
        has them (`saved`). None if there is nothing new. Raises OSError.

        Called between two turns of the run, when the output has whole lines only.
        """
        size = output.stat().st_size if output.exists() else 0
        if size <= self._size:
            return None
        local = output.with_name("part.upload")
        with output.open("rb") as source, open_new(local) as part:
            source.seek(self._size)
            left = size - self._size
            while left and (block := source.read(min(left, READ_BYTES))):
                part.write(block)
                left -= len(block)
        name = f"{self._prefix}/{len(self.names):06}-{uuid.uuid4().hex}"
        self._store.put(local, name)
        local.unlink()
        return [*self.names, name], size

    def saved(self, names: Sequence[str], size: int) -> None:
        """The record has these names, with so many bytes of the output."""
        self.names, self._size = list(names), size

"""Where batches run, and what stays there when a gateway dies. All of it blocks."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from cellama.api.http.files.store import Store

RUNS = "runs"
OLD_S = 86_400  # since the last change: its batch has most likely ended


def folder_of(store: Store, batch_id: str) -> Path:
    """The folder of a run on this machine."""
    return store.work_dir / RUNS / batch_id


def parts_of(batch_id: str) -> str:
    """What the names of its parts in the store begin with."""
    return f"parts/{batch_id}"


def clear(store: Store, batch_id: str) -> None:
    """Nothing of a run that has ended is there any more: neither its folder here, nor parts, whoever has put them
    there. Raises OSError."""
    shutil.rmtree(folder_of(store, batch_id), ignore_errors=True)
    store.delete_folder(parts_of(batch_id))


def old_runs(store: Store, now: float) -> list[str]:
    """Batches whose folders here have not been written to for a day; `now` is in unix s."""
    return [folder.name for folder in (store.work_dir / RUNS).glob("*") if _changed_at(folder) < now - OLD_S]


def _changed_at(folder: Path) -> float:
    times = []
    for path in (folder, *folder.glob("*")):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times, default=0.0)

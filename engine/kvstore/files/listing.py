"""What the folder has, for people: `cellama cache`, and whoever removes the states of one scope."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cellama.engine.kvstore.states import Head

from .folder import Folder, KeptFile
from .head import read_head


@dataclass(frozen=True, slots=True)
class StateView:
    """A file as its head tells."""

    key: str
    identity: str  # digest of what cells depend on beside tokens, adapters and scope
    scope: str
    num_tokens: int
    num_bytes: int
    last_used: float  # unix seconds
    is_pinned: bool
    problem: str | None  # why it is no state: a reason of `Miss`


@dataclass(frozen=True, slots=True)
class FolderView:
    """The folder as a whole."""

    folder: str
    num_states: int
    num_bytes: int
    num_pinned: int
    pinned_bytes: int
    num_identities: int
    free_bytes: int | None  # of the file system; None if it can't be told


def view_of(file: KeptFile) -> StateView:
    """Opens the file, and reads its head."""
    head = read_head(file.path)
    known = head if isinstance(head, Head) else None
    return StateView(
        key=file.key,
        identity=file.identity,
        scope=known.scope if known else "",
        num_tokens=len(known.tokens) if known else 0,
        num_bytes=file.num_bytes,
        last_used=file.last_used,
        is_pinned=file.is_pinned,
        problem=None if isinstance(head, Head) else head.value,
    )


def of_scope(files: Iterable[KeptFile], scope: str) -> Iterator[KeptFile]:
    """Those that say that they are of this scope."""
    return (file for file in files if isinstance(head := read_head(file.path), Head) and head.scope == scope)


def view_of_folder(folder: Folder) -> FolderView:
    """Opens no state."""
    files = folder.states()
    pinned = [file for file in files if file.is_pinned]
    try:
        free = shutil.disk_usage(folder.root).free
    except OSError:
        free = None
    return FolderView(
        folder=str(folder.root),
        num_states=len(files),
        num_bytes=sum(file.num_bytes for file in files),
        num_pinned=len(pinned),
        pinned_bytes=sum(file.num_bytes for file in pinned),
        num_identities=len({file.identity for file in files}),
        free_bytes=free,
    )

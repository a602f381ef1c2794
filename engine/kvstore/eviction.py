"""Which files are removed so that the directory keeps to its quota: the least recently used, except for the pinned."""

from __future__ import annotations

from collections.abc import Sequence

from .states import KeptFile


class FolderFull(Exception):
    """What is pinned or being written, and the new file, exceed the quota together."""


def files_to_evict(files: Sequence[KeptFile], quota_bytes: int, taken_bytes: int, new_bytes: int) -> list[KeptFile]:
    """Return the files to remove before a file of `new_bytes` is written; 0 only restores the quota.

    `files` are in the order of their last use, the oldest first. `taken_bytes` are those of files that are being
    written. A file larger than the quota goes first: it can never be read. Raises FolderFull.
    """
    if new_bytes > quota_bytes:
        raise FolderFull(f"{new_bytes} bytes are more than the quota of {quota_bytes}")
    excess = taken_bytes + sum(file.num_bytes for file in files) + new_bytes - quota_bytes
    evicted = []
    for file in sorted(files, key=lambda file: file.num_bytes <= quota_bytes):
        if excess > 0 and not file.is_pinned:
            evicted.append(file)
            excess -= file.num_bytes
    if excess > 0 and new_bytes:
        raise FolderFull(f"{excess} bytes too many are pinned or being written")
    return evicted

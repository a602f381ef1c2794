"""The directory of states that models and processes share: names, locks, pins, and what dead processes left.

    ROOT/.lock                    held (flock) by whoever changes which files there are
    ROOT/<identity>/<key>.kv      a state; its time of modification is the time of its last use
    ROOT/<identity>/<key>.pin     empty: that state is never evicted
    ROOT/<identity>/.<any>.tmp    being written, and locked as long as its writer lives

No thread owns anything here. The lock file is all that processes agree on, on several machines, too, where flock works.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from .eviction import files_to_evict
from .keys import is_key
from .states import KeptFile

LOCK_PATIENCE_S = 10.0  # the lock is held for some ms; a process that was stopped with it must not stop the others
LOCK_POLL_S = 0.01  # flock has no timeout; much shorter than the fsync that follows
STATE, PIN, TEMPORARY = ".kv", ".pin", ".tmp"
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp\Z")


@dataclass(slots=True)
class UnfinishedFile:
    """A file without its name; its size counts in the quota already. Locked until it is closed."""

    path: Path
    descriptor: int

    def publish(self, key: str) -> Path:
        """Give the file its name. All of it is on the disk before another process sees it."""
        target = self.path.with_name(key + STATE)
        os.fsync(self.descriptor)
        os.replace(self.path, target)
        _sync_folder(target.parent)
        return target

    def close(self) -> None:
        """Remove the file, unless it has been published."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self.descriptor)


class Folder:
    """The files that processes share. Any thread. Methods raise OSError where the system does."""

    def __init__(self, root: Path, quota_bytes: int) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        self.num_evictions = 0  # files that this object removed for the quota

    def directory_of(self, identity: bytes) -> Path:
        """Return the directory of an identity's files, which may not exist yet."""
        return self.root / sha256(identity).hexdigest()

    def prepare(self, directory: Path) -> None:
        """Create what is missing, remove what dead processes left, and restore the quota.

        Raises PermissionError for a directory in which others can change files.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        entry = directory.lstat()
        if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.geteuid() or entry.st_mode & 0o022:
            raise PermissionError(f"{directory} is not a folder that only this user writes to; remove it, or chmod 700")
        with self.locked():
            self._evict(0)

    # Files

    def states(self) -> list[KeptFile]:
        """Return the states of all identities, the least recently used first. Others may come and go meanwhile."""
        found = [file for directory in self._directories() for file in _states_in(directory)]
        return sorted(found, key=lambda file: (file.last_used, file.path))

    def create(self, directory: Path, num_bytes: int) -> UnfinishedFile:
        """Create a file of so many bytes, and evict older states for it. Raises FolderFull if that is not enough.

        The file has its length at once, so every process counts all of it: the quota holds at every moment.
        """
        with self.locked():
            self._evict(num_bytes)
            path = directory / f".{secrets.token_hex(8)}{TEMPORARY}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, num_bytes)
            except BaseException:
                UnfinishedFile(path, descriptor).close()
                raise
        return UnfinishedFile(path, descriptor)

    def pin(self, key: str) -> bool:
        """Keep a state until it is unpinned; return False if there is none of that key."""
        if not self.find(key):
            return False
        with self.locked():
            paths = self.find(key)
            for path in paths:
                os.close(os.open(path.with_suffix(PIN), os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        return bool(paths)

    def unpin(self, key: str) -> bool:
        """Allow a state to be evicted; return False if it was not pinned."""
        found = False
        for path in self.find(key):
            with contextlib.suppress(FileNotFoundError):
                path.with_suffix(PIN).unlink()
                found = True
        return found

    def find(self, key: str) -> list[Path]:
        """Return the files of a key, one per identity. Raises ValueError for a text that is not a key."""
        if not is_key(key):
            raise ValueError(f"{key[:80]!r} is not a key; a key has 64 hex digits")
        paths = (directory / f"{key}{STATE}" for directory in self._directories())
        return [path for path in paths if path.is_file() and not path.is_symlink()]

    def remove(self, files: Iterable[Path]) -> int:
        """Remove states with their pins; return how many there were."""
        paths = list(files)
        if not paths:
            return 0
        with self.locked():
            return sum(map(_remove, paths))

    def _evict(self, new_bytes: int) -> None:
        """Under the lock: make place for so many bytes."""
        taken_bytes = sum(_sweep(directory) for directory in self._directories())
        for file in files_to_evict(self.states(), self.quota_bytes, taken_bytes, new_bytes):
            self.num_evictions += _remove(file.path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the directory. Raises TimeoutError if another process or thread holds it for too long."""
        path = self.root / ".lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + LOCK_PATIENCE_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"another process has held {path} for {LOCK_PATIENCE_S:.0f} s") from None
                time.sleep(LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _directories(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            return [Path(entry.path) for entry in entries if is_key(entry.name) and entry.is_dir(follow_symlinks=False)]
        return []


def touch(path: Path) -> None:
    """Make a state the most recently used one, where the system allows it."""
    with contextlib.suppress(OSError):
        os.utime(path)


def is_pinned(path: Path) -> bool:
    """True if the state is never evicted."""
    return path.with_suffix(PIN).exists()


def _remove(path: Path) -> bool:
    """Remove a state and its pin; return False if it was gone already."""
    with contextlib.suppress(FileNotFoundError):
        path.with_suffix(PIN).unlink()
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _states_in(directory: Path) -> Iterator[KeptFile]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        listed = {entry.name: entry for entry in entries}
        for name, entry in listed.items():
            stem, dot, suffix = name.partition(".")
            if dot + suffix != STATE or not is_key(stem):
                continue
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield KeptFile(Path(entry.path), found.st_size, found.st_mtime, is_pinned=stem + PIN in listed)


def _sweep(directory: Path) -> int:
    """Under the lock: remove files whose writers are gone; return the bytes of those that are being written."""
    with contextlib.suppress(FileNotFoundError):
        return sum(_size_if_written(directory / name) for name in os.listdir(directory) if _TEMPORARY.match(name))
    return 0


def _size_if_written(path: Path) -> int:
    """Return the size of a file that is being written; remove it if its writer is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # gone, or not ours
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return 0
    except BlockingIOError:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

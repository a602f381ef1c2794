"""A state directory that models and processes share: names, locks, pins, the quota, and files of crashed writers.

    `ROOT/.lock` is held (flock) by the process that changes which files exist.
    `ROOT/<identity>/<key>.kv` is a state. Its modification time is the time of its last use.
    `ROOT/<identity>/<key>.pin` is an empty file that excludes the state from eviction.
    `ROOT/<identity>/.<hex>.tmp` is an unfinished file, locked as long as its writer is alive.

The objects in this module don't belong to a particular thread. Processes coordinate only through the lock file. If the
file system supports flock across machines, the processes can run on different machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from .keys import is_key
from .states import StoredFile

LOCK_TIMEOUT_S = 10.0  # seconds; the lock is held for milliseconds, but a suspended process must not block the others
LOCK_POLL_S = 0.01  # seconds between attempts, because flock has no timeout; much shorter than the fsync that follows
STATE, PIN, TEMPORARY = ".kv", ".pin", ".tmp"
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp\Z")


class DirectoryFull(Exception):
    """Raised if the quota is too small for the new file together with the pinned and unfinished files."""


@dataclass(slots=True)
class UnfinishedFile:
    """A file that is being written.

    The file is locked until it is closed. The file's final size counts towards the quota from the start.
    """

    path: Path
    descriptor: int

    def publish(self, key: str) -> Path:
        """Sync the file and rename it to its key, so other processes see only complete files."""
        target = self.path.with_name(key + STATE)
        os.fsync(self.descriptor)
        os.replace(self.path, target)
        _sync_directory(target.parent)
        return target

    def close(self) -> None:
        """Remove the file unless it has been published."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self.descriptor)


class StateDirectory:
    """Manages the files that processes share. Any thread may use this class.

    The methods raise OSError if the file system reports an error.
    """

    def __init__(self, root: Path, quota_bytes: int) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        self.num_evictions = 0  # files that this object removed because of the quota

    def directory_of(self, identity: bytes) -> Path:
        """Return the directory for an identity's files. The directory may not exist yet."""
        return self.root / sha256(identity).hexdigest()

    def prepare(self, directory: Path) -> None:
        """Create the directories, remove the files of crashed writers, and evict states that exceed the quota.

        Raises PermissionError if other users can change files in the directory.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        entry = directory.lstat()
        if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.geteuid() or entry.st_mode & 0o022:
            raise PermissionError(
                f"{directory} is not a directory that only this user can write to; remove it, or run chmod 700"
            )
        with self.locked():
            self._evict(0)

    # Files

    def states(self) -> list[StoredFile]:
        """Return the states of all identities, least recently used first.

        Other processes may add and remove files at the same time.
        """
        found = [file for directory in self._directories() for file in _states_in(directory)]
        return sorted(found, key=lambda file: (file.last_used, file.path))

    def create(self, directory: Path, num_bytes: int) -> UnfinishedFile:
        """Create a file of `num_bytes` bytes, and evict older states if the quota requires it. Raises DirectoryFull.

        The file has its final size from the start. All processes count the final size, so the quota is never exceeded.
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
        """Exclude a state from eviction. Return False if no state has this key."""
        if not self.find(key):
            return False
        with self.locked():
            paths = self.find(key)
            for path in paths:
                os.close(os.open(path.with_suffix(PIN), os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        return bool(paths)

    def unpin(self, key: str) -> bool:
        """Allow the eviction of a pinned state. Return False if the state was not pinned."""
        found = False
        for path in self.find(key):
            with contextlib.suppress(FileNotFoundError):
                path.with_suffix(PIN).unlink()
                found = True
        return found

    def find(self, key: str) -> list[Path]:
        """Return the files with this key, at most one per identity.

        Raises ValueError if `key` is not a valid key.
        """
        if not is_key(key):
            raise ValueError(f"{key[:80]!r} is not a valid key; a key has 64 hex digits")
        paths = (directory / f"{key}{STATE}" for directory in self._directories())
        return [path for path in paths if path.is_file() and not path.is_symlink()]

    def remove(self, files: Iterable[Path]) -> int:
        """Remove states and their pins. Return the number of states that were actually removed."""
        paths = list(files)
        if not paths:
            return 0
        with self.locked():
            return sum(map(_remove, paths))

    def _evict(self, new_bytes: int) -> None:
        """Remove states until `new_bytes` more bytes fit into the quota. The caller must hold the lock."""
        unfinished_bytes = sum(_sweep(directory) for directory in self._directories())
        for file in files_to_evict(self.states(), self.quota_bytes, unfinished_bytes, new_bytes):
            self.num_evictions += _remove(file.path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock during the `with` block.

        Raises TimeoutError if another process or thread holds the lock for longer than LOCK_TIMEOUT_S.
        """
        path = self.root / ".lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"another process has locked {path} for {LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _directories(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            return [Path(entry.path) for entry in entries if is_key(entry.name) and entry.is_dir(follow_symlinks=False)]
        return []


def files_to_evict(
    files: Sequence[StoredFile], quota_bytes: int, unfinished_bytes: int, new_bytes: int
) -> list[StoredFile]:
    """Return the files that must be removed before a file of `new_bytes` bytes is created.

    `new_bytes` is 0 if no file will be created. `files` must be sorted by last use, least recently used first. Pinned
    files are never removed. Files larger than the quota are removed first, because such files are never read. Raises
    DirectoryFull. This function is pure.
    """
    if new_bytes > quota_bytes:
        raise DirectoryFull(f"a file of {new_bytes} bytes exceeds the quota of {quota_bytes} bytes")
    excess = unfinished_bytes + sum(file.num_bytes for file in files) + new_bytes - quota_bytes
    evicted = []
    for file in sorted(files, key=lambda file: file.num_bytes <= quota_bytes):
        if excess > 0 and not file.is_pinned:
            evicted.append(file)
            excess -= file.num_bytes
    if excess > 0 and new_bytes:
        raise DirectoryFull(f"pinned and unfinished files leave too little space; {excess} more bytes are needed")
    return evicted


def touch(path: Path) -> None:
    """Mark a state as most recently used, if the file system allows this."""
    with contextlib.suppress(OSError):
        os.utime(path)


def is_pinned(path: Path) -> bool:
    """Return whether the state is excluded from eviction."""
    return path.with_suffix(PIN).exists()


def _remove(path: Path) -> bool:
    """Remove a state and its pin. Return False if the state didn't exist."""
    with contextlib.suppress(FileNotFoundError):
        path.with_suffix(PIN).unlink()
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _states_in(directory: Path) -> Iterator[StoredFile]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        listed = {entry.name: entry for entry in entries}
        for name, entry in listed.items():
            stem, dot, suffix = name.partition(".")
            if dot + suffix != STATE or not is_key(stem):
                continue
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield StoredFile(Path(entry.path), found.st_size, found.st_mtime, is_pinned=stem + PIN in listed)


def _sweep(directory: Path) -> int:
    """Remove unfinished files of crashed writers, and return the total size of all other unfinished files.

    The caller must hold the lock.
    """
    with contextlib.suppress(FileNotFoundError):
        return sum(_unfinished_size(directory / name) for name in os.listdir(directory) if _TEMPORARY.match(name))
    return 0


def _unfinished_size(path: Path) -> int:
    """Return the size of an unfinished file in bytes.

    If the file's writer has crashed, remove the file and return 0.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # the file has vanished, or belongs to another user
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return 0
    except BlockingIOError:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

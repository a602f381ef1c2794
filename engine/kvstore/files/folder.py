"""The folder of states, shared by models and processes: a quota, who goes first, pins, what dead processes left.

    ROOT/.lock                    held (flock) by whoever changes which files there are
    ROOT/<identity>/<key>.kv      a state; its time of modification is that of its last use
    ROOT/<identity>/<key>.pin     empty: that state stays
    ROOT/<identity>/.<any>.tmp    being written, and locked as long as its writer lives

Nothing here is owned by a thread. The lock file is all that there is to agree on, also with other machines where flock
works.
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

from cellama.engine.kvstore.keys import is_key

LOCK_PATIENCE_S = 10.0  # a process that is stopped while it holds the lock must not stop the others
LOCK_POLL_S = 0.01
AHEAD_S = 60.0  # a file used later than this from now has the time of another clock
STATE, PIN, TEMPORARY = ".kv", ".pin", ".tmp"
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp\Z")


class FolderFull(Exception):
    """The quota has no place left for it: what is there is pinned or being written, or it is larger than all of it."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A state in the folder, as its name and the file system tell."""

    path: Path
    num_bytes: int
    last_used: float  # unix seconds
    is_pinned: bool

    @property
    def key(self) -> str:
        return self.path.stem

    @property
    def identity(self) -> str:
        return self.path.parent.name


@dataclass(slots=True)
class Draft:
    """A file without a name yet; its size is taken from the quota already. Locked until it is closed."""

    path: Path
    descriptor: int

    def publish(self, key: str) -> Path:
        """Gives it its name, for good: it is on the disk, whole, before another process sees it."""
        target = self.path.with_name(key + STATE)
        os.fsync(self.descriptor)
        os.replace(self.path, target)
        _sync_folder(target.parent)
        return target

    def close(self) -> None:
        """It is gone, unless it has been published."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        os.close(self.descriptor)


class Folder:
    """What processes agree on. Methods raise OSError where the system does; any thread."""

    def __init__(self, root: Path, quota_bytes: int) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        self.num_evictions = 0  # by this object

    def directory_of(self, identity: bytes) -> Path:
        """The folder of an identity's files, which may not be there yet."""
        return self.root / sha256(identity).hexdigest()

    def prepare(self, directory: Path) -> None:
        """Root and directory are there; what processes left that ended is gone, and the quota holds.

        PermissionError for a directory in which others can change files.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        told = directory.lstat()
        if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.geteuid() or told.st_mode & 0o022:
            raise PermissionError(f"{directory} is not a folder that only this user writes to; remove it, or chmod 700")
        with self.locked():
            self._fit(0)

    # Files

    def states(self) -> list[KeptFile]:
        """All there are, of all identities, the least recently used first. Others may come and go meanwhile."""
        found = [file for directory in self._directories() for file in _states_in(directory)]
        return sorted(found, key=lambda file: (file.last_used, file.path))

    def draft(self, directory: Path, num_bytes: int) -> Draft:
        """A file for so many bytes; older states go for it. FolderFull if that is not enough.

        Its length is set at once, so that whoever looks counts all of it: the quota holds at every moment.
        """
        with self.locked():
            self._fit(num_bytes)
            path = directory / f".{secrets.token_hex(8)}{TEMPORARY}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, num_bytes)
            except BaseException:
                Draft(path, descriptor).close()
                raise
        return Draft(path, descriptor)

    def pin(self, key: str) -> bool:
        """The state stays until it is unpinned; False if there is none of that key."""
        if not self.find(key):
            return False
        with self.locked():
            paths = self.find(key)
            for path in paths:
                os.close(os.open(path.with_suffix(PIN), os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        return bool(paths)

    def unpin(self, key: str) -> bool:
        """The state goes when its time has come; False if it was not pinned."""
        found = False
        for path in self.find(key):
            with contextlib.suppress(FileNotFoundError):
                path.with_suffix(PIN).unlink()
                found = True
        return found

    def find(self, key: str) -> list[Path]:
        """Where the state of a key lies. ValueError for what is no key: that never becomes a path."""
        if not is_key(key):
            raise ValueError(f"{key[:80]!r} is no key: that is 64 hex digits")
        paths = (directory / f"{key}{STATE}" for directory in self._directories())
        return [path for path in paths if path.is_file() and not path.is_symlink()]

    def remove(self, files: Iterable[Path]) -> int:
        """Takes states away, with their pins; how many there were."""
        count, paths = 0, list(files)
        if not paths:
            return 0
        with self.locked():
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    count += 1
                with contextlib.suppress(FileNotFoundError):
                    path.with_suffix(PIN).unlink()
        return count

    # The quota

    def _fit(self, num_bytes: int) -> None:
        """Under the lock: there is place for so many bytes more."""
        if num_bytes > self.quota_bytes:
            raise FolderFull(f"{num_bytes} bytes are more than the quota of {self.quota_bytes}")
        writing = sum(_sweep(directory) for directory in self._directories())
        files = self.states()
        excess = writing + sum(file.num_bytes for file in files) + num_bytes - self.quota_bytes
        _mend_times(files)
        for file in sorted(files, key=lambda file: file.num_bytes <= self.quota_bytes):  # the impossible ones first
            if excess <= 0:
                return
            if not file.is_pinned:
                with contextlib.suppress(FileNotFoundError):
                    file.path.unlink()
                self.num_evictions += 1
                excess -= file.num_bytes
        if excess > 0 and num_bytes:
            raise FolderFull(f"{excess} bytes too many are pinned or being written")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """No other process or thread changes which files there are. TimeoutError if one does so for too long."""
        descriptor = self._lock()
        try:
            yield
        finally:
            os.close(descriptor)

    def _lock(self) -> int:
        path = self.root / ".lock"
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # else it was removed and made anew
                    return descriptor
            except (BlockingIOError, FileNotFoundError):
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held {path} for {LOCK_PATIENCE_S:.0f} s")
            time.sleep(LOCK_POLL_S)

    def _directories(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as entries:
            return [Path(entry.path) for entry in entries if is_key(entry.name) and entry.is_dir(follow_symlinks=False)]
        return []


def touch(path: Path) -> None:
    """It is the most recently used one now, as far as we may say so."""
    with contextlib.suppress(OSError):
        os.utime(path)


def is_pinned(path: Path) -> bool:
    """True if the state stays."""
    return path.with_suffix(PIN).exists()


def _states_in(directory: Path) -> Iterator[KeptFile]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        listed = {entry.name: entry for entry in entries}
        for name, entry in listed.items():
            stem, dot, suffix = name.partition(".")
            if dot + suffix != STATE or not is_key(stem):
                continue
            with contextlib.suppress(FileNotFoundError):
                told = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(told.st_mode):
                    yield KeptFile(Path(entry.path), told.st_size, told.st_mtime, stem + PIN in listed)


def _sweep(directory: Path) -> int:
    """Under the lock: removes drafts whose writers are gone, and pins of nothing; the bytes of the other drafts."""
    count = 0
    with contextlib.suppress(FileNotFoundError):
        names = set(os.listdir(directory))
        for name in names:
            if name.endswith(PIN) and name.removesuffix(PIN) + STATE not in names and is_key(name.removesuffix(PIN)):
                (directory / name).unlink(missing_ok=True)
            elif _TEMPORARY.match(name):
                count += _size_if_written(directory / name)
    return count


def _size_if_written(draft: Path) -> int:
    """The size of a draft that is being written; one whose writer is gone is removed."""
    try:
        descriptor = os.open(draft, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # gone, or not ours
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.unlink(missing_ok=True)
        return 0
    except BlockingIOError:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _mend_times(files: Iterable[KeptFile]) -> None:
    """A file from the future would outlive all others."""
    for file in files:
        if file.last_used > time.time() + AHEAD_S:
            touch(file.path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

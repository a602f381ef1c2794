"""Where contents lie: a directory, or whatever fsspec reaches. All methods block: call them in a thread."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from cellama.api.http.errors import ApiError
from cellama.config import Settings, SettingsError

log = logging.getLogger(__name__)

READ_BYTES = 1 << 18
IDENTITY = "identity"
FOLDER_MODE, FILE_MODE = 0o700, 0o600  # what tenants upload is for the gateways alone
RETRY_S = 60.0  # for clients, while files are out of reach


class FileStore(Protocol):
    """Contents by their names, which are ids of ours: letters, digits, `_`, `-`, `.` and `/`. Raises OSError."""

    work_dir: Path  # on this machine; where uploads come in and batches run

    @property
    def shares_work(self) -> bool:
        """Whether other gateways see `work_dir`, too."""
        ...

    def put(self, local: Path, name: str) -> None:
        """A copy of a local file is there, whole, in place of what had this name."""
        ...

    def put_first(self, data: bytes, name: str) -> None:
        """These bytes are there, unless something had this name before: then that is as it was."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Raises FileNotFoundError."""
        ...

    def delete(self, name: str) -> None:
        """It is not there, whether it was or not."""
        ...

    def delete_folder(self, name: str) -> None:
        """Nothing is there whose name begins with this one and a `/`."""
        ...

    def old(self, before: float) -> list[str]:
        """Files that were put before this time (unix s), by the clocks of those who put them; where the store can
        tell."""
        ...


class DirectoryStore:
    """A directory. Uploads and runs lie in it, too, so that they become files by a rename."""

    shares_work = True

    def __init__(self, root: Path) -> None:
        """Makes the directory where it is first written to."""
        self._files = root / "files"
        self.work_dir = root / "work"

    def put(self, local: Path, name: str) -> None:
        target = self._files / name
        make_folder(target.parent)
        part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
        try:
            _link_or_copy(local, part)
            part.chmod(FILE_MODE)
            os.utime(part)  # when it was put, see `old`
            part.replace(target)
            _sync_folder(target.parent)
        finally:
            part.unlink(missing_ok=True)

    def put_first(self, data: bytes, name: str) -> None:
        target = self._files / name
        make_folder(target.parent)
        part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
        try:
            with open_new(part) as written:
                written.write(data)
            _link_first(part, target)
            _sync_folder(target.parent)
        finally:
            part.unlink(missing_ok=True)

    def open(self, name: str) -> BinaryIO:
        return (self._files / name).open("rb")

    def delete(self, name: str) -> None:
        (self._files / name).unlink(missing_ok=True)

    def delete_folder(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._files / name)

    def old(self, before: float) -> list[str]:
        found = []
        for path in self._files.glob("file-*"):
            with contextlib.suppress(FileNotFoundError):  # another gateway sweeps, too
                if path.stat().st_mtime < before:
                    found.append(path.name)
        return found


class UrlStore:
    """A place that fsspec reaches, for instance a bucket. It must replace whole objects, as all object stores do."""

    shares_work = False

    def __init__(self, url: str, work_dir: Path) -> None:
        """Raises SettingsError if fsspec, or what it needs for such URLs, is not installed."""
        try:
            import fsspec  # an extra, and a slow import

            self._system, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise SettingsError(
                f"gateway_files_dir is a URL that can't be used: {error}; pip install 'cellama[files]' and fsspec's "
                "package for such URLs (s3fs, gcsfs, …), or name a directory"
            ) from None
        self._root = str(root).rstrip("/")
        self.work_dir = work_dir

    def put(self, local: Path, name: str) -> None:
        with _as_os_errors():
            self._system.put_file(str(local), self._path_in_folder(name))

    def put_first(self, data: bytes, name: str) -> None:
        """As far as the file system knows how: S3 and Google's do."""
        with contextlib.suppress(FileExistsError), _as_os_errors():
            self._system.pipe_file(self._path_in_folder(name), data, mode="create")

    def open(self, name: str) -> BinaryIO:
        with _as_os_errors():
            return cast(BinaryIO, self._system.open(self._path(name), "rb"))

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            self._system.rm_file(self._path(name))

    def delete_folder(self, name: str) -> None:
        self._system.invalidate_cache()  # other gateways have written there, too
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            self._system.rm(self._path(name), recursive=True)

    def old(self, before: float) -> list[str]:
        """None: that would be a look at each object of a bucket. It has rules of its own for this."""
        return []

    def _path_in_folder(self, name: str) -> str:
        path = self._path(name)
        with contextlib.suppress(FileExistsError, NotImplementedError):
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)  # which buckets have no need of
        return path

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are not there, for this user alone."""
    for missing in reversed([folder, *folder.parents]):
        if not missing.exists():
            missing.mkdir(FOLDER_MODE, exist_ok=True)


def open_new(path: Path) -> BinaryIO:
    """Open a file for writing that only this user can read, in place of what had this name."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, FILE_MODE))


def store_of(settings: Settings) -> FileStore:
    """That of the settings. Raises SettingsError."""
    place = settings.gateway_files_dir
    own = settings.data_dir / "gateway"
    if place is None:
        return DirectoryStore(own)
    if "://" in place:
        return UrlStore(place, settings.gateway_work_dir or own)
    return DirectoryStore(Path(place).expanduser().absolute())


def identity_of(store: FileStore) -> str | None:
    """An id that lies in the store itself: gateways with the same one see the same contents, under whatever path or
    URL. None while nothing has been put there. Raises OSError."""
    try:
        with store.open(IDENTITY) as file:
            return file.read().decode()
    except FileNotFoundError:
        return None


def give_identity(store: FileStore) -> str:
    """The store has one from now on, and keeps it, whoever else gives it one at the same time. Raises OSError."""
    if (there := identity_of(store)) is not None:
        return there
    store.put_first(uuid.uuid4().hex.encode(), IDENTITY)
    if (there := identity_of(store)) is None:
        raise OSError(errno.EIO, f"{IDENTITY!r} was written, and is not there")
    return there


def blocks_of(file: BinaryIO) -> Iterator[bytes]:
    """A file in pieces; it is closed at the end, or when its reader goes away. Raises OSError."""
    with file, _as_os_errors():
        while block := file.read(READ_BYTES):
            yield block


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Some of fsspec's file systems have errors of their own, for instance for a bucket that is out of reach."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def fetch(store: FileStore, name: str, local: Path) -> None:
    """A copy on this machine. Raises FileNotFoundError, OSError."""
    part = local.with_name(f"{local.name}.part")
    with open_new(part) as copy:
        for block in blocks_of(store.open(name)):
            copy.write(block)
        copy.flush()
        os.fsync(copy.fileno())
    part.replace(local)


def unavailable(error: OSError) -> ApiError:
    """What a client is told of a disk: no paths of this machine. The log has them."""
    log.error("files can't be written or read: %s", error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        told = "the gateway has no room for files now; delete some"
    else:
        told = "the gateway can't reach its files now; its log says why"
    return ApiError(503, told, code="files_unavailable", retry_after_s=RETRY_S)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        with source.open("rb") as read, open_new(target) as written:
            shutil.copyfileobj(read, written, READ_BYTES)
            written.flush()
            os.fsync(written.fileno())


def _link_first(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except OSError:  # a file system without links
        source.replace(target)


def _sync_folder(folder: Path) -> None:
    """A rename is on disk with its folder."""
    opened: Any = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

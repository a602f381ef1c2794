"""Where contents lie: a directory, or whatever fsspec reaches. All functions block: call them in a thread."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from cellama.api.http.errors import ApiError
from cellama.config import Settings, SettingsError

log = logging.getLogger(__name__)

READ_BYTES = 1 << 18  # 256 KiB: large enough for disks and buckets, small beside the body of a request
IDENTITY = "identity"
FOLDER_MODE, FILE_MODE = 0o700, 0o600  # what tenants upload is for the gateways alone
RETRY_S = 60.0  # for clients: a disk that is full or out of reach is rarely back sooner


class DirectoryStore:
    """A directory. Uploads and runs lie in it, too, so that they become files by a rename.

    Names are ids of ours: letters, digits, `_`, `-`, `.` and `/`. Methods raise OSError.
    """

    shares_work = True  # other gateways see `work_dir`

    def __init__(self, root: Path) -> None:
        """The directory is created when it is first written to."""
        self._files = root / "files"
        self.work_dir = root / "work"  # for uploads that arrive, and for runs of batches

    def put(self, local: Path, name: str) -> None:
        """Store a copy of a local file, whole, in place of what had this name."""
        with self._new(name) as (part, target):
            try:
                os.link(local, part)
            except OSError:  # another file system, or one without links
                write_new(part, blocks_of(local.open("rb")))
            part.chmod(FILE_MODE)
            os.utime(part)  # see `old`
            part.replace(target)

    def put_first(self, data: bytes, name: str) -> None:
        """Store these bytes, unless something has this name already."""
        with self._new(name) as (part, target):
            write_new(part, [data])
            try:
                os.link(part, target)
            except FileExistsError:
                return
            except OSError:  # a file system without links
                part.replace(target)

    @contextlib.contextmanager
    def _new(self, name: str) -> Iterator[tuple[Path, Path]]:
        """A path to write to, and the one that the file gets then."""
        target = self._files / name
        make_folder(target.parent)
        part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
        try:
            yield part, target
        finally:
            part.unlink(missing_ok=True)
        _sync(target.parent)

    def open(self, name: str) -> BinaryIO:
        """Raises FileNotFoundError."""
        return (self._files / name).open("rb")

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        (self._files / name).unlink(missing_ok=True)

    def delete_folder(self, name: str) -> None:
        """Delete everything whose name begins with this one and a `/`."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._files / name)

    def old(self, before: float) -> list[str]:
        """Return the files that were put before this time (unix s), by the clocks of those that put them."""
        found = []
        for path in self._files.glob("file-*"):
            with contextlib.suppress(FileNotFoundError):  # another gateway sweeps, too
                if path.stat().st_mtime < before:
                    found.append(path.name)
        return found


class UrlStore:
    """A place that fsspec reaches, for instance a bucket, with the methods of DirectoryStore. It must replace whole
    objects, as all object stores do."""

    shares_work = False

    def __init__(self, url: str, work_dir: Path) -> None:
        """`work_dir` is on this machine. Raises SettingsError if fsspec, or what it needs for such URLs, is not
        installed."""
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
        """As far as the file system supports it: those of S3 and Google do."""
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
        """Return nothing: that would be a look at each object of a bucket, which has rules of its own for this."""
        return []

    def _path_in_folder(self, name: str) -> str:
        path = self._path(name)
        with contextlib.suppress(FileExistsError, NotImplementedError):
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)  # buckets don't need it
        return path

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


FileStore = DirectoryStore | UrlStore


def store_of(settings: Settings) -> FileStore:
    """Return the store of the settings. Raises SettingsError."""
    place = settings.gateway_files_dir
    own = settings.data_dir / "gateway"
    if place is None:
        return DirectoryStore(own)
    if "://" in place:
        return UrlStore(place, settings.gateway_work_dir or own)
    return DirectoryStore(Path(place).expanduser().absolute())


def identity_of(store: FileStore) -> str | None:
    """Return an id that lies in the store itself: gateways with the same one see the same contents, under whatever path
    or URL. None while nothing has been put there. Raises OSError."""
    try:
        with store.open(IDENTITY) as file:
            return file.read().decode()
    except FileNotFoundError:
        return None


def give_identity(store: FileStore) -> str:
    """Return the store's id, and give it one if it has none: the first gateway that does so wins. Raises OSError."""
    if (there := identity_of(store)) is None:
        store.put_first(uuid.uuid4().hex.encode(), IDENTITY)
        there = identity_of(store)
    if there is None:
        raise OSError(errno.EIO, f"{IDENTITY!r} was written, and is not there")
    return there


def make_folder(folder: Path) -> None:
    """Create a directory and the missing ones above it, for this user alone."""
    for missing in reversed([folder, *folder.parents]):
        if not missing.exists():
            missing.mkdir(FOLDER_MODE, exist_ok=True)


def open_new(path: Path) -> BinaryIO:
    """Open a file for writing that only this user can read, in place of what had this name."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, FILE_MODE))


def write_new(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a file that only this user can read. It is on disk when this returns. Raises OSError."""
    with open_new(path) as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def blocks_of(file: BinaryIO) -> Iterator[bytes]:
    """A file in pieces. It is closed at the end, and if its reader stops early. Raises OSError."""
    with file, _as_os_errors():
        while block := file.read(READ_BYTES):
            yield block


def fetch(store: FileStore, name: str, local: Path) -> None:
    """Copy a file to this machine, whole. Raises FileNotFoundError, OSError."""
    part = local.with_name(f"{local.name}.part")
    write_new(part, blocks_of(store.open(name)))
    part.replace(local)


def unavailable(error: OSError) -> ApiError:
    """Return the error for the client, without paths of this machine, and log the cause."""
    log.error("files can't be written or read: %s", error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = "the gateway has no room for files now; delete some"
    else:
        message = "the gateway can't reach its files now; its log says why"
    return ApiError(503, message, code="files_unavailable", retry_after_s=RETRY_S)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Some of fsspec's file systems have errors of their own, for instance for a bucket that is out of reach."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def _sync(folder: Path) -> None:
    """A rename is on disk once its directory is."""
    opened: Any = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

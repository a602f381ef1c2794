"""Store file contents in a directory or on any storage that fsspec supports.

All functions block, so call them in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from cellama.api.http.errors import ApiError
from cellama.config import Settings, SettingsError
from cellama.config.logging import event_logger

log = event_logger(__name__)

READ_BYTES = 1 << 18  # 256 KiB: large enough for disks and buckets, and small compared to the body of a request
STORE_ID = "identity"  # name of the file with the id of the store
DIRECTORY_MODE, FILE_MODE = 0o700, 0o600  # uploads of tenants are only for the gateways
RETRY_S = 60.0  # for clients, because a full or unreachable disk is rarely available sooner


class DirectoryStore:
    """A store in a directory.

    Uploads and runs are kept in the same directory so that renaming can turn them into stored files. The names that the
    gateway uses contain only letters, digits, `_`, `-`, `.` and `/`. All methods may raise OSError.
    """

    shares_work = True  # other gateways can read `work_dir`

    def __init__(self, root: Path) -> None:
        """Create a store. The store's directory is created by the first write."""
        self._files = root / "files"
        self.work_dir = root / "work"  # for uploads in progress, and for runs of batches

    def put(self, local: Path, name: str) -> None:
        """Store a copy of a local file. An earlier file with this name is replaced atomically."""
        with self._new(name) as (part, target):
            try:
                os.link(local, part)
            except OSError:  # another file system, or one without links
                write_new(part, blocks_of(local.open("rb")))
            part.chmod(FILE_MODE)
            os.utime(part)  # see `older_than`
            part.replace(target)

    def put_first(self, data: bytes, name: str) -> None:
        """Store the bytes unless a file with this name already exists."""
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
        """Yield a temporary path to write to, and the path to which the written file is renamed."""
        target = self._files / name
        make_directory(target.parent)
        part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
        try:
            yield part, target
        finally:
            part.unlink(missing_ok=True)
        _sync(target.parent)

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. Raises FileNotFoundError."""
        return (self._files / name).open("rb")

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        (self._files / name).unlink(missing_ok=True)

    def delete_directory(self, name: str) -> None:
        """Delete all files whose names start with this name and a `/`."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._files / name)

    def older_than(self, before: float) -> list[str]:
        """Return the files that were stored before this time, which is in Unix seconds.

        A file's time comes from the clock of the gateway that stored it.
        """
        found = []
        for path in self._files.glob("file-*"):
            with contextlib.suppress(FileNotFoundError):  # another gateway may sweep at the same time
                if path.stat().st_mtime < before:
                    found.append(path.name)
        return found


class UrlStore:
    """A store on any storage that fsspec supports, for example a bucket.

    This class has the same methods as DirectoryStore. The storage must replace objects atomically, as all object stores
    do.
    """

    shares_work = False

    def __init__(self, url: str, work_dir: Path) -> None:
        """Create a store. `work_dir` is a directory on this machine for uploads and runs.

        Raises SettingsError if fsspec or the package that it needs for such URLs is not installed.
        """
        try:
            import fsspec  # an extra, and a slow import

            self._system, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise SettingsError(
                f"gateway_files_dir: this URL can't be used: {error}; run pip install 'cellama[files]' and install "
                "fsspec's package for such URLs (s3fs, gcsfs, …), or use a directory"
            ) from None
        self._root = str(root).rstrip("/")
        self.work_dir = work_dir

    def put(self, local: Path, name: str) -> None:
        with _as_os_errors():
            self._system.put_file(str(local), self._new_path(name))

    def put_first(self, data: bytes, name: str) -> None:
        """Store these bytes unless the name already exists.

        The name is checked only if the file system supports this check, as S3 and Google Cloud Storage do.
        """
        with contextlib.suppress(FileExistsError), _as_os_errors():
            self._system.pipe_file(self._new_path(name), data, mode="create")

    def open(self, name: str) -> BinaryIO:
        with _as_os_errors():
            return cast(BinaryIO, self._system.open(self._path(name), "rb"))

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            self._system.rm_file(self._path(name))

    def delete_directory(self, name: str) -> None:
        self._system.invalidate_cache()  # other gateways may have stored files as well
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            self._system.rm(self._path(name), recursive=True)

    def older_than(self, before: float) -> list[str]:
        """Return an empty list, because listing a whole bucket is slow.

        The bucket's lifecycle rules can delete old objects.
        """
        return []

    def _new_path(self, name: str) -> str:
        path = self._path(name)
        with contextlib.suppress(FileExistsError, NotImplementedError):
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)  # buckets don't need it
        return path

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


FileStore = DirectoryStore | UrlStore


def store_of(settings: Settings) -> FileStore:
    """Return the store configured in the settings. Raises SettingsError."""
    location = settings.gateway_files_dir
    default = settings.data_dir / "gateway"
    if location is None:
        return DirectoryStore(default)
    if "://" in location:
        return UrlStore(location, settings.gateway_work_dir or default)
    return DirectoryStore(Path(location).expanduser().absolute())


def read_store_id(store: FileStore) -> str | None:
    """Return the store's id, or None if the store is empty. Raises OSError.

    The id is stored in a file in the store. Gateways that read the same id share the contents, even if they use
    different paths or URLs.
    """
    try:
        with store.open(STORE_ID) as file:
            return file.read().decode()
    except FileNotFoundError:
        return None


def ensure_store_id(store: FileStore) -> str:
    """Return the store's id. If the store doesn't have an id yet, write a new id. Raises OSError."""
    if (store_id := read_store_id(store)) is None:
        store.put_first(uuid.uuid4().hex.encode(), STORE_ID)
        store_id = read_store_id(store)
    if store_id is None:
        raise OSError(errno.EIO, f"{STORE_ID!r} was written, but can't be found; check the storage")
    return store_id


def make_directory(directory: Path) -> None:
    """Create a directory and its missing parents. Only this user can access the new directories."""
    for missing in reversed([directory, *directory.parents]):
        if not missing.exists():
            missing.mkdir(DIRECTORY_MODE, exist_ok=True)


def open_new(path: Path) -> BinaryIO:
    """Open a new file for writing, which only this user can access. An existing file is replaced."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, FILE_MODE))


def write_new(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a file that only this user can read, and sync it to disk before returning. Raises OSError."""
    with open_new(path) as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def blocks_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the file's contents in blocks.

    The file is closed at the end, even if the reader stops early. Raises OSError.
    """
    with file, _as_os_errors():
        while block := file.read(READ_BYTES):
            yield block


def download(store: FileStore, name: str, local: Path) -> None:
    """Copy a file to this machine.

    The copy appears at its path only when it is complete. Raises FileNotFoundError or OSError.
    """
    part = local.with_name(f"{local.name}.part")
    write_new(part, blocks_of(store.open(name)))
    part.replace(local)


def unavailable(error: OSError) -> ApiError:
    """Log a store error. Return an error for the client that contains no paths on this machine."""
    log.error("file storage access failed", detail=f"{error}; the request fails with status 503")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = "the gateway has no space left for files; delete some"
    else:
        message = "the gateway can't access its files; its log has the reason"
    return ApiError(503, message, code="files_unavailable", retry_after_s=RETRY_S)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Convert errors from fsspec's file systems into OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def _sync(directory: Path) -> None:
    """Sync a directory to disk, including renames inside it."""
    opened: Any = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

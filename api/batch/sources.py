"""Open a run's input, which is a file, a URL or stdin, and may be compressed."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from cellama.tasks.contract.errors import InvalidJob

from .formats import Compression, compression_of, is_url

STANDARD = Path("-")
Source = Path | str  # a string is a URL


def name_of(source: Source) -> str:
    """Return the name that messages use for an input."""
    return "stdin" if source == STANDARD else repr(str(source))


def absolute(source: Source) -> str:
    """Return an input's name as an absolute path, or unchanged for a URL or stdin."""
    return str(source.absolute()) if isinstance(source, Path) and source != STANDARD else str(source)


def source_of(name: str | Path) -> Source:
    """Return an input's name as a URL (a string) or as a Path."""
    return name if isinstance(name, str) and is_url(name) else Path(name)


@contextlib.contextmanager
def open_source(source: Source) -> Iterator[BinaryIO]:
    """Open an input for reading, with decompression if necessary. Raises InvalidJob and OSError."""
    if source == STANDARD:
        yield sys.stdin.buffer
        return
    with contextlib.ExitStack() as opened:
        raw: Any = opened.enter_context(_open_url(source) if isinstance(source, str) else source.open("rb"))
        compression = compression_of(source)
        if compression:
            raw = opened.enter_context(_decompressed(raw, compression))
        try:
            yield raw
        except (EOFError, gzip.BadGzipFile) as error:
            raise InvalidJob(
                f"can't read {name_of(source)}: {error}; the file is damaged or is not in {compression} format"
            ) from None


def _open_url(url: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise InvalidJob("missing packages: fsspec; run `pip install 'cellama[files]'`") from None
    try:
        return fsspec.open(url, "rb").open()
    except ImportError as error:  # fsspec names the package
        raise InvalidJob(f"can't open {url!r}: {error}") from None
    except FileNotFoundError:
        raise InvalidJob(f"file {url!r} not found; correct the URL") from None
    except (OSError, ValueError) as error:
        raise InvalidJob(f"can't open {url!r}: {error}; correct the URL") from None


def _decompressed(stream: Any, compression: Compression) -> Any:
    return gzip.GzipFile(fileobj=stream) if compression == "gzip" else zstd_module().open(stream, "rb")


def compressed(path: Path, compression: Compression) -> Any:
    """Open a file for writing, with compression."""
    if compression == "gzip":
        return gzip.GzipFile(path, "wb", compresslevel=6, mtime=0)
    return zstd_module().open(path, "wb") if compression else path.open("wb")


class _ArrowZstd:
    """Opens zstd files using pyarrow."""

    @staticmethod
    def open(target: Any, mode: str) -> Any:
        import pyarrow

        if mode == "rb":
            return io.BufferedReader(pyarrow.CompressedInputStream(target, "zstd"))
        return pyarrow.CompressedOutputStream(str(target), "zstd")


def zstd_module() -> Any:
    """Return an object whose `open` reads and writes zstd files.

    Raises InvalidJob if neither Python nor pyarrow provides zstd.
    """
    with contextlib.suppress(ImportError):
        return importlib.import_module("compression.zstd")  # Python 3.14
    with contextlib.suppress(ImportError):
        import pyarrow  # noqa: F401

        return _ArrowZstd
    raise InvalidJob("missing packages: pyarrow, which reads and writes zstd; run `pip install 'cellama[parquet]'`")


def fingerprint_of(source: Source) -> str:
    """Return a string that changes when the input changes, or "" for stdin."""
    if source == STANDARD:
        return ""
    if isinstance(source, str):
        with contextlib.suppress(Exception):  # file systems raise errors of their own libraries
            import fsspec

            system, path = fsspec.core.url_to_fs(source)
            return str(system.ukey(path))
        return ""
    paths = [source, *files_of(source)] if source.is_dir() else [source]
    digest = hashlib.sha256()
    for path in paths:
        found = path.stat()
        digest.update(f"{path.absolute()}\0{found.st_size}\0{found.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return f"sha256:{digest.hexdigest()}"


def files_of(directory: Path) -> list[Path]:
    """Return a sorted list of the files in a directory and its subdirectories, without hidden files."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(directory).parts))

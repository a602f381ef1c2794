"""What is refused before a run starts: an input that is not text, an output whose name promises another format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cellama.tasks.contract.errors import InvalidJob

from .lines import format_of
from .options import STANDARD, BatchOptions

HEAD_BYTES = 4096  # of an input: enough to recognise its encoding
NUL_SHARE = 0.25  # of every second byte: in UTF-16, letters of Latin scripts have a NUL each
_BEGINNINGS = {  # of files → what they are, and the command that makes them text in UTF-8
    b"\xff\xfe\0\0": ("UTF-32 text", "iconv -f UTF-32 -t UTF-8"),
    b"\0\0\xfe\xff": ("UTF-32 text", "iconv -f UTF-32 -t UTF-8"),
    b"\xff\xfe": ("UTF-16 text", "iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "iconv -f UTF-16 -t UTF-8"),
    b"\x1f\x8b": ("compressed with gzip", "gzip -dc"),
    b"BZh": ("compressed with bzip2", "bzip2 -dc"),
    b"\xfd7zXZ\0": ("compressed with xz", "xz -dc"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "zstd -dc"),
    b"PK\x03\x04": ("a ZIP archive or an Excel file", ""),
    b"PAR1": ("a Parquet file", ""),
    b"SQLite format 3\0": ("an SQLite database", ""),
}
_REMEDIES = {
    "a ZIP archive or an Excel file": "extract it, or export the table as CSV in UTF-8",
    "a Parquet file": "give it a name that ends with .parquet, or add --format parquet",
    "an SQLite database": "export the table as CSV in UTF-8",
}
_TABLES = (".csv", ".tsv", ".parquet", ".pq", ".feather", ".arrow", ".orc", ".avro", ".xlsx", ".xls", ".ods")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".br", ".zip", ".tar", ".tgz", ".7z")
_OTHERS = (".db", ".sqlite", ".sqlite3", ".duckdb", ".npy", ".npz", ".pkl", ".pickle", ".h5", ".hdf5", ".safetensors",
           ".xml", ".yaml", ".yml", ".toml", ".html", ".md", ".pdf")  # fmt: skip


def check_files(options: BatchOptions) -> None:
    """Raise InvalidJob for files that a run could not read, or would write in another format than their names say."""
    if options.input != STANDARD and not options.input.is_file():
        raise InvalidJob(f"there is no file {str(options.input)!r}; check the path")
    for path in (options.output, options.errors):
        if path is not None and path != STANDARD:
            _check_target(path)
    if format_of(options.input, options.format) != "parquet":
        name = "stdin" if options.input == STANDARD else repr(str(options.input))
        _check_head(name, _head(options.input))


def _check_target(path: Path) -> None:
    suffix = path.suffix.lower()
    wanted = path.with_name(path.name.removesuffix(path.suffix)).with_suffix(".jsonl")
    if suffix in _COMPRESSED:
        raise InvalidJob(
            f"results are written as JSON lines, without compression, so {str(path)!r} is the wrong name; write "
            f"{str(wanted)!r}, then compress that"
        )
    if suffix in (*_TABLES, *_OTHERS):
        then = ""
        if suffix in (".csv", ".parquet"):
            then = f": pandas.read_json({str(wanted)!r}, lines=True).to_{suffix[1:]}({str(path)!r})"
        raise InvalidJob(
            f"results are written as JSON lines, not as {suffix[1:]}, so {str(path)!r} is the wrong name; write "
            f"{str(wanted)!r}, then convert that{then}"
        )
    if not path.parent.is_dir():
        raise InvalidJob(f"there is no directory {str(path.parent)!r}; create it, or name another file")
    if path.exists() and not path.is_file():
        raise InvalidJob(f"{str(path)!r} is not a file; name another one")


def _head(path: Path) -> bytes:
    if path != STANDARD:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    stream: Any = sys.stdin.buffer
    return bytes(stream.peek(HEAD_BYTES)[:HEAD_BYTES]) if hasattr(stream, "peek") else b""


def _check_head(name: str, head: bytes) -> None:
    for beginning, (what, command) in _BEGINNINGS.items():
        if head.startswith(beginning):
            remedy = _REMEDIES.get(what) or f"convert it: `{command} IN > OUT`"
            raise InvalidJob(f"{name} is {what}, and must be text in UTF-8; {remedy}")
    for half, encoding in ((head[1::2], "UTF-16LE"), (head[::2], "UTF-16BE")):
        if half.count(0) > NUL_SHARE * len(half):
            raise InvalidJob(
                f"{name} seems to be {encoding} text, and must be text in UTF-8; convert it: `iconv -f {encoding} "
                "-t UTF-8 IN > OUT`"
            )

"""Check the files of a run before it starts: the input must be text, and the output must have a suitable name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cellama.tasks.contract.errors import InvalidJob

from .lines import format_of
from .options import STANDARD, BatchOptions

HEAD_BYTES = 4096  # first bytes of an input: enough to recognise its encoding
MIN_NUL_SHARE = 0.25  # an input is UTF-16 if this share of every second byte is NUL, as in Latin letters
_SIGNATURES = {  # first bytes of a file → its format, and a command that converts it to UTF-8 text
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
    """Raise InvalidJob if the input can't be read, or if the name of an output has the suffix of a different format."""
    if options.input != STANDARD and not options.input.is_file():
        raise InvalidJob(f"there is no file {str(options.input)!r}; correct the path")
    for path in (options.output, options.errors):
        if path is not None and path != STANDARD:
            _check_target(path)
    if format_of(options.input, options.format) != "parquet":
        name = "stdin" if options.input == STANDARD else repr(str(options.input))
        _check_head(name, _head(options.input))


def _check_target(path: Path) -> None:
    suffix = path.suffix.lower()
    better = path.with_name(path.name.removesuffix(path.suffix)).with_suffix(".jsonl")
    if suffix in _COMPRESSED:
        raise InvalidJob(
            f"results can't be written to {str(path)!r}, because they are uncompressed JSON lines; write them to "
            f"{str(better)!r}, and compress that file afterwards"
        )
    if suffix in (*_TABLES, *_OTHERS):
        command = ""
        if suffix in (".csv", ".parquet"):
            command = f": pandas.read_json({str(better)!r}, lines=True).to_{suffix[1:]}({str(path)!r})"
        raise InvalidJob(
            f"results can't be written to {str(path)!r}, because they are JSON lines, not {suffix[1:]}; write them to "
            f"{str(better)!r}, and convert that file afterwards{command}"
        )
    if not path.parent.is_dir():
        raise InvalidJob(f"there is no directory {str(path.parent)!r}; create it, or name another file")
    if path.exists() and not path.is_file():
        raise InvalidJob(f"{str(path)!r} is not a file; name a file")


def _head(path: Path) -> bytes:
    if path != STANDARD:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    stream: Any = sys.stdin.buffer
    return bytes(stream.peek(HEAD_BYTES)[:HEAD_BYTES]) if hasattr(stream, "peek") else b""


def _check_head(name: str, head: bytes) -> None:
    for signature, (kind, command) in _SIGNATURES.items():
        if head.startswith(signature):
            remedy = _REMEDIES.get(kind) or f"convert it with `{command} IN > OUT`"
            raise InvalidJob(f"{name} is {kind}, but must be UTF-8 text; {remedy}")
    for half, encoding in ((head[1::2], "UTF-16LE"), (head[::2], "UTF-16BE")):
        if half.count(0) > MIN_NUL_SHARE * len(half):
            raise InvalidJob(
                f"{name} seems to be {encoding} text, but must be UTF-8 text; convert it with `iconv -f {encoding} "
                "-t UTF-8 IN > OUT`"
            )

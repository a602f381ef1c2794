"""Check a run's options, input encoding and output name before the run starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cellama.tasks.contract.errors import InvalidJob

from .arrow_process import check_pyarrow
from .formats import COLUMNAR, OutputKind, format_of, output_kind
from .options import BatchOptions
from .sources import STANDARD, Source, name_of, open_source, zstd_module
from .templates import RowTemplate

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
    b"ARROW1": ("an Arrow file", ""),
    b"SQLite format 3\0": ("an SQLite database", ""),
}
_REMEDIES = {
    "a ZIP archive or an Excel file": "extract it, or export the table as CSV in UTF-8",
    "a Parquet file": "give it a name that ends with .parquet, or add --format parquet",
    "an Arrow file": "give it a name that ends with .arrow, or add --format arrow",
    "an SQLite database": "export the table as CSV in UTF-8",
}


def check_files(options: BatchOptions) -> OutputKind:
    """Return the output format. Raises InvalidJob if the run can't read its input or write its output."""
    source = options.input
    if isinstance(source, Path) and source != STANDARD and not (source.is_file() or source.is_dir()):
        raise InvalidJob(f"file {str(source)!r} not found; correct the path")
    kind = OutputKind("jsonl", "") if options.output == STANDARD else _check_target(options.output)
    if options.errors is not None and options.errors != STANDARD and not _check_target(options.errors).is_appended:
        raise InvalidJob(f"errors are JSON lines and can't be written to {str(options.errors)!r}; use a .jsonl file")
    _check_rows(options, kind)
    if isinstance(source, Path) and source.is_dir() and options.output.absolute().is_relative_to(source.absolute()):
        raise InvalidJob(f"{str(options.output)!r} is in the input directory; write the output to another directory")
    format_ = format_of(source, options.format)
    if format_ in COLUMNAR or kind.format in COLUMNAR:
        check_pyarrow()
    if kind.compression == "zstd":
        zstd_module()
    if isinstance(source, Path) and format_ not in (*COLUMNAR, "directory"):
        if source.is_dir():
            raise InvalidJob(f"{str(source)!r} is a directory; choose a file, or use --format directory")
        _check_head(name_of(source), _head(source))
    return kind


def _check_rows(options: BatchOptions, kind: OutputKind) -> None:
    if options.template is not None:
        RowTemplate(options.template)
        if options.column is not None:
            raise InvalidJob("--column and --template can't be combined; insert the column into the template")
    if options.limit is not None and options.sample is not None:
        raise InvalidJob("--limit and --sample can't be combined; remove one of them")
    for name, count in (("limit", options.limit), ("sample", options.sample)):
        if count is not None and count < 1:
            raise InvalidJob(f"{name}: {count} is not a valid number of rows; it must be at least 1")
    if options.sample is not None and options.input == STANDARD:
        raise InvalidJob("--sample: stdin can be read only once; use a file, or --limit")
    if kind.is_table and options.params.get("n", 1) != 1:
        raise InvalidJob(
            f"n: {options.params['n']} results per line don't fit into one row of {str(options.output)!r}; use a "
            ".jsonl file"
        )


def _check_target(path: Path) -> OutputKind:
    if not path.parent.is_dir():
        raise InvalidJob(f"directory {str(path.parent)!r} not found; create it, or choose another file")
    if path.exists() and not path.is_file():
        raise InvalidJob(f"{str(path)!r} is not a file; choose a file")
    return output_kind(path)


def _head(source: Source) -> bytes:
    if source != STANDARD:
        with open_source(source) as file:
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

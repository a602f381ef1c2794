"""Recognise a file's format and compression from its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

from cellama.tasks.contract.errors import InvalidJob

Format = Literal["auto", "jsonl", "text", "csv", "tsv", "parquet", "arrow", "directory"]
OutputFormat = Literal["jsonl", "csv", "tsv", "parquet", "arrow", "rows"]  # rows: flat JSON lines, for lists in Python
Compression = Literal["", "gzip", "zstd"]
COLUMNAR = ("parquet", "arrow")  # formats that only pyarrow reads and writes
_TABLES: dict[str, Literal["csv", "tsv", "parquet", "arrow"]] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_INPUTS: Mapping[str, Format] = {**_TABLES, ".txt": "text"}
_OUTPUTS: Mapping[str, OutputFormat] = {**_TABLES, ".rows": "rows"}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
_NOT_WRITTEN = (
    *(".orc", ".avro", ".xlsx", ".xls", ".ods", ".db", ".sqlite", ".sqlite3", ".duckdb", ".npy", ".npz", ".pkl"),
    *(".pickle", ".h5", ".hdf5", ".safetensors", ".xml", ".yaml", ".yml", ".toml", ".html", ".md", ".pdf"),
    *(".bz2", ".xz", ".lz4", ".br", ".zip", ".tar", ".tgz", ".7z"),
)


def is_url(name: Path | str) -> bool:
    """Return whether a name is a URL, which fsspec opens, instead of a path."""
    return isinstance(name, str) and "://" in name


def _suffixes(name: Path | str) -> tuple[str, Compression]:
    """Return a name's suffix without the compression suffix, and the compression."""
    path = PurePosixPath(urlsplit(name).path) if isinstance(name, str) else name
    compression = _COMPRESSIONS.get(path.suffix.lower(), "")
    return (path.with_suffix("") if compression else path).suffix.lower(), compression


def format_of(name: Path | str | None, given: Format) -> Format:
    """Return an input's format. For "auto", the file name determines the format (default: jsonl)."""
    if given != "auto" or name is None:
        return "jsonl" if given == "auto" else given
    if isinstance(name, Path) and name.is_dir():
        return "directory"
    return _INPUTS.get(_suffixes(name)[0], "jsonl")


def compression_of(name: Path | str) -> Compression:
    """Return a file's compression based on its name."""
    return _suffixes(name)[1]


@dataclass(frozen=True, slots=True)
class OutputKind:
    """An output format."""

    format: OutputFormat
    compression: Compression

    @property
    def is_appended(self) -> bool:
        """Return whether the output format allows results to be appended as they arrive.

        Results in other formats are written when the run ends.
        """
        return self.format == "jsonl" and not self.compression

    @property
    def is_table(self) -> bool:
        """Return whether each result is a row that includes the input's columns."""
        return self.format != "jsonl"


def output_kind(path: Path) -> OutputKind:
    """Return an output's format based on its name (default: JSON lines).

    Raises InvalidJob if the format can't be written.
    """
    suffix, compression = _suffixes(path)
    if suffix in _NOT_WRITTEN or path.suffix.lower() in _NOT_WRITTEN:
        raise InvalidJob(
            f"results can't be written to {str(path)!r}, because {path.suffix[1:].lower()} is not an output "
            "format; use .jsonl, .csv, .tsv, .parquet or .arrow (text formats also with .gz or .zst)"
        )
    found = OutputKind(_OUTPUTS.get(suffix, "jsonl"), compression)
    if compression and found.format in COLUMNAR:
        raise InvalidJob(f"{str(path)!r}: {found.format} files are already compressed; remove {path.suffix!r}")
    return found

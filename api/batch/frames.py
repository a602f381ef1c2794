"""Run jobs for rows in memory: a pandas or polars DataFrame, an Arrow table, or a list of dictionaries or strings."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cellama.tasks.contract.errors import InvalidJob

from .arrow_process import check_pyarrow
from .formats import COLUMNAR, output_kind
from .options import BatchOptions, Summary

RowsInMemory = Sequence[Mapping[str, Any]] | Sequence[str] | Iterator[Mapping[str, Any]] | Iterator[str]
MAX_HASHED_BYTES = 1 << 20  # per read of the input file


def run_rows(
    data: Any, output: str | Path | None, options: dict[str, Any], run: Callable[[BatchOptions], Summary]
) -> Any:
    """Run each row as a job, and return the rows with their results in an object of the same kind.

    Without `output`, the results exist only in memory, and the run can't be resumed. Issues a warning if rows have
    failed. Raises the same errors as `run`.
    """
    library = _library_of(data)
    if output is not None and output_kind(Path(output)).format not in COLUMNAR:
        raise InvalidJob(f"output: {str(output)!r} can't store all types in the result; use a .parquet or .arrow file")
    with tempfile.TemporaryDirectory(prefix="cellama-batch-") as directory:
        source = Path(directory) / ("input.parquet" if library else "input.jsonl")
        if library:
            check_pyarrow()
            _write_table(_table_of(data, library), source)
        elif _write_rows(data, source) and not (options.get("column") or options.get("template")):
            options = {**options, "column": "text"}
        target = Path(output) if output is not None else Path(directory) / f"output.{'parquet' if library else 'rows'}"
        found = run(BatchOptions.of(source, target, **options, content=_digest_of(source)))
        _warn(found, is_kept=output is not None)
        return _result_of(target, library) if target.exists() else _nothing(data, library)


def _library_of(data: Any) -> str:
    """Return "pandas", "polars" or "pyarrow", or "" for other iterables, without importing any of these libraries."""
    name = type(data).__module__.partition(".")[0]
    if name in ("pandas", "polars", "pyarrow"):
        if type(data).__name__ not in ("DataFrame", "Table"):
            raise InvalidJob(f"input: a {name} {type(data).__name__} is not a table; pass a DataFrame or a Table")
        return name
    if isinstance(data, (Mapping, bytes)) or not isinstance(data, Iterable):
        raise InvalidJob(f"input: {type(data).__name__} is not supported; pass a path, a table, or a list of rows")
    return ""


def _table_of(data: Any, library: str) -> Any:
    import pyarrow

    if library == "pandas":  # with its index, so that results can be joined even if rows fail
        return pyarrow.Table.from_pandas(data, preserve_index=True)
    return data.to_arrow() if library == "polars" else data


def _write_table(table: Any, path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(table, path)


def _write_rows(data: Iterable[Any], path: Path) -> bool:
    """Write rows as JSON lines. Return whether the rows are strings."""
    are_texts = False
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(data):
            are_texts = isinstance(row, str)
            if not are_texts and not isinstance(row, Mapping):
                raise InvalidJob(
                    f"input: row {number} is of type {type(row).__name__}; it must be a dictionary or a string"
                )
            file.write(json.dumps({"text": row} if are_texts else dict(row), default=str) + "\n")
    return are_texts


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(MAX_HASHED_BYTES):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _result_of(path: Path, library: str) -> Any:
    if path.suffix == ".rows":
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    from pyarrow import feather, parquet

    is_parquet = output_kind(path).format == "parquet"
    table = parquet.read_table(path) if is_parquet else feather.read_table(path, memory_map=False)
    if library == "pandas":
        return table.to_pandas()
    if library == "polars":
        return sys.modules["polars"].from_arrow(table)
    return table if library else table.to_pylist()


def _nothing(data: Any, library: str) -> Any:
    """Return an empty object of the input's kind, for inputs without any results."""
    if not library:
        return []
    return data.slice(0, 0) if library == "pyarrow" else data.head(0)


def _warn(found: Summary, *, is_kept: bool) -> None:
    progress = found.progress
    if found.errors is not None and progress.failed:
        with found.errors.open(encoding="utf-8") as file:
            error = json.loads(file.readline())
        message = (error.get("error") or {}).get("message", "")
        where = f"; all errors are in {str(found.errors)!r}" if is_kept else ""
        text = f"{progress.failed} of {progress.total} rows failed and are not in the result: {message}{where}"
        warnings.warn(text, stacklevel=4)
    if progress.left:
        text = f"the run was {found.state}; {progress.left} of {progress.total} rows are not in the result"
        warnings.warn(text, stacklevel=4)

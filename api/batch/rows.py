"""Tables as bulk runs read them, CSV and Parquet: a prompt per row, its id, and what else the row has."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from cellama.tasks.contract.errors import InvalidJob

ID_COLUMNS = ("custom_id", "id")  # that tell rows apart if nothing else is said


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table. `columns` are all but those of the id and the prompt."""

    id: str | int
    prompt: str
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a table have the prompt and the id. None: its only one; one that is called so, if there is."""

    prompt: str | None = None
    id: str | None = None

    @property
    def are_named(self) -> bool:
        return self.prompt is not None or self.id is not None


def rows_of_csv(stream: BinaryIO, columns: Columns) -> Iterator[TableRow]:
    """The rows of a CSV file. Raises InvalidJob."""
    csv.field_size_limit(1 << 30)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(text, restval="")
    number = 0
    try:
        prompt, row_id = _chosen(columns, list(reader.fieldnames or []))
        for number, row in enumerate(reader, start=1):
            row.pop(None, None)  # values beyond the last column
            yield _row(row, number, prompt, row_id)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidJob(f"the CSV can't be read after row {number}: {error}; it must be CSV in UTF-8") from None
    finally:
        text.detach()  # who opened the stream closes it


def rows_of_parquet(stream: BinaryIO, columns: Columns) -> Iterator[TableRow]:
    """The rows of a Parquet file. Raises InvalidJob."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InvalidJob("Parquet files need pyarrow; install cellama[parquet]") from None
    number = 0
    try:
        file = ParquetFile(stream)
        prompt, row_id = _chosen(columns, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield _row(row, number, prompt, row_id)
    except (ArrowException, OSError) as error:  # a pipe has no end to begin at
        raise InvalidJob(
            f"the Parquet file can't be read after row {number}: {error}; it can't come from stdin"
        ) from None


def _row(row: dict[str, Any], number: int, prompt: str, row_id: str | None) -> TableRow:
    others = {name: _plain(value) for name, value in row.items() if name not in (prompt, row_id)}
    return TableRow(str(number) if row_id is None else _id(row[row_id]), _text(row[prompt]), others)


def _id(value: Any) -> str | int:
    """The id of a row: a whole number stays one."""
    return value if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _plain(value: Any) -> Any:
    """A value as JSON can have it: a time, for instance, as text."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


def _chosen(columns: Columns, names: list[str]) -> tuple[str, str | None]:
    """The columns of the prompt and of the id. Raises InvalidJob."""
    row_id = columns.id or next((name for name in names if name.lower() in ID_COLUMNS), None)
    if row_id is not None and row_id not in names:
        raise InvalidJob(f"there is no column {row_id!r} for --id-column; the file has: {_listed(names)}")
    others = [name for name in names if name != row_id]
    prompt = others[0] if columns.prompt is None and len(others) == 1 else columns.prompt
    if prompt not in names or (columns.prompt is None and _other_separator(names)):
        said = "no --column is given" if columns.prompt is None else f"there is no column {prompt!r}"
        raise InvalidJob(f"{said}; the file has: {_listed(names)}{_separator_hint(names)}")
    return prompt, None if row_id == prompt and columns.id is None else row_id


def _other_separator(names: list[str]) -> str:
    """What separates the columns of a table that has only one by its commas; "" if nothing does."""
    return next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), "")


def _separator_hint(names: list[str]) -> str:
    mark = _other_separator(names)
    return f"; its columns seem to be separated by {mark!r}, and must be by commas" if mark else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"

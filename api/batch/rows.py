"""Read the rows of a table, a text file or a directory."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from cellama.tasks.contract.errors import InvalidJob

from .arrow_process import rows_of_arrow
from .formats import COLUMNAR, Format
from .sources import files_of

READ_BYTES = 1 << 16  # bytes of an oversized line to skip per read


@dataclass(frozen=True, slots=True)
class InputRow:
    """A row's values, keyed by column. Row numbers start at 1."""

    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadInputRow:
    """A row that can't be read, and the reason why."""

    number: int
    message: str
    code: str = "invalid_request"


InputData = BinaryIO | Path | str  # a stream, or for Parquet, Arrow and directories the path or URL


def rows_of(data: InputData, format_: Format, max_bytes: int) -> Iterator[InputRow | BadInputRow]:
    """Yield an input's rows, or the objects in JSON lines. Raises InvalidJob if the input has a different format."""
    if format_ in COLUMNAR:
        if not isinstance(data, (Path, str)):
            raise InvalidJob(f"{format_} can't be read from stdin; use a file")
        yield from _numbered(rows_of_arrow(data, format_))
    elif format_ == "directory":
        assert isinstance(data, Path)
        yield from _rows_of_directory(data, max_bytes)
    else:
        assert not isinstance(data, (Path, str))
        if format_ == "jsonl":
            yield from _rows_of_json(data, max_bytes)
        elif format_ == "text":
            yield from _rows_of_text(data, max_bytes)
        else:
            yield from _numbered(_rows_of_csv(data, "\t" if format_ == "tsv" else ","))


def _numbered(rows: Iterator[dict[str, Any]]) -> Iterator[InputRow]:
    for number, values in enumerate(rows, start=1):
        yield InputRow(number, values)


def raw_lines(stream: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | BadInputRow]]:
    """Yield the number and bytes of each non-blank line. For an oversized line, yield an error instead of the bytes."""
    number = 0
    while raw := stream.readline(max_bytes + 1):
        number += 1
        if len(raw) > max_bytes and not raw.endswith(b"\n"):
            size = len(raw)
            while not raw.endswith(b"\n") and (raw := stream.readline(READ_BYTES)):
                size += len(raw)
            yield number, BadInputRow(number, too_long(size, max_bytes), code="line_too_long")
        elif raw.strip():
            yield number, raw


def too_long(size: int, limit: int) -> str:
    """Return the error message for a line that is larger than the limit."""
    return f"the line has {size} bytes, and the limit is {limit}; split the line, or raise max_payload_bytes"


def _not_utf8(number: int, error: UnicodeDecodeError, what: str = "line") -> BadInputRow:
    message = f"the {what} is not valid UTF-8 at byte {error.start}; convert the file to UTF-8"
    return BadInputRow(number, message, code="invalid_json_line")


def _rows_of_json(stream: BinaryIO, max_bytes: int) -> Iterator[InputRow | BadInputRow]:
    for number, raw in raw_lines(stream, max_bytes):
        yield raw if isinstance(raw, BadInputRow) else _object(number, raw)


def _object(number: int, raw: bytes) -> InputRow | BadInputRow:
    try:
        value = json.loads(raw.decode("utf-8-sig"))  # `loads` would guess the encoding of bytes
    except UnicodeDecodeError as error:
        return _not_utf8(number, error)
    except (ValueError, RecursionError) as error:
        return BadInputRow(number, f"the line is not valid JSON: {error}", code="invalid_json_line")
    if not isinstance(value, dict):
        message = f"the line is of type {type(value).__name__}; it must be a JSON object"
        return BadInputRow(number, message, code="invalid_json_line")
    return InputRow(number, value)


def _rows_of_text(stream: BinaryIO, max_bytes: int) -> Iterator[InputRow | BadInputRow]:
    for number, raw in raw_lines(stream, max_bytes):
        try:
            text = raw if isinstance(raw, BadInputRow) else raw.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError as error:
            text = _not_utf8(number, error)
        yield text if isinstance(text, BadInputRow) else InputRow(number, {"text": text})


def _rows_of_directory(directory: Path, max_bytes: int) -> Iterator[InputRow | BadInputRow]:
    for number, path in enumerate(files_of(directory), start=1):
        name = str(path.relative_to(directory))
        size = path.stat().st_size
        if size > max_bytes:
            yield BadInputRow(number, f"{name}: {too_long(size, max_bytes).replace('the line', 'the file')}")
            continue
        try:
            yield InputRow(number, {"path": name, "text": path.read_bytes().decode("utf-8-sig")})
        except UnicodeDecodeError as error:
            yield BadInputRow(number, f"{name}: {_not_utf8(number, error, 'text').message}")


def _rows_of_csv(stream: BinaryIO, separator: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(1 << 30)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(text, restval="", delimiter=separator)
    number = 0
    try:
        names = list(reader.fieldnames or [])
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidJob(f"several columns are named {twice[0]!r}; rename all but one")
        for row in reader:
            number += 1
            row.pop(None, None)  # values beyond the last column
            yield row
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidJob(f"can't read the CSV file after row {number}: {error}; it must be CSV in UTF-8") from None
    finally:
        if not stream.closed:
            text.detach()  # leave the stream open, because the caller closes it

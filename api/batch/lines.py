"""Read the input of a bulk run (JSON lines, text, CSV or Parquet), and check each line before it becomes a job."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from cellama.api.openai.bodies import params_of_body
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.chunk import LINE_JOBS, LineKind, line_bytes, max_lines_bytes
from cellama.tasks.contract.names import PRIORITY_BULK
from cellama.tasks.contract.payloads import parse_job

Form = Literal["openai", "short"]
LineId = str | int  # as in the input: 7 and "7" are different ids
Format = Literal["auto", "jsonl", "text", "csv", "parquet"]
_BY_SUFFIX: dict[str, Format] = {".txt": "text", ".csv": "csv", ".parquet": "parquet"}
_KINDS: dict[str, tuple[LineKind, str]] = {  # field of a short line → kind of its job, and name of the parameter
    "prompt": ("generate", "prompt"),
    "messages": ("chat", "messages"),
    "text": ("embed", "texts"),
    "texts": ("embed", "texts"),
}
MAX_KEY_CHARS = 4096  # length of a prompt in a sort key: prompts with a longer common prefix are adjacent anyway
READ_BYTES = 1 << 16  # bytes of an oversized line to skip per read
ID_COLUMNS = ("custom_id", "id")  # names of the id column if none is given


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table. `columns` contains all columns except the id and the prompt."""

    id: str | int
    prompt: str
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns that contain the prompt and the id.

    Without `prompt`, the table must have only one column in addition to the id. Without `id`, a column in ID_COLUMNS is
    used if the table has one.
    """

    prompt: str | None = None
    id: str | None = None

    @property
    def are_named(self) -> bool:
        return self.prompt is not None or self.id is not None


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A valid line. `params` are the parameters of its job, and line numbers start at 1."""

    number: int
    id: LineId
    form: Form
    kind: LineKind
    model: str
    params: Mapping[str, Any]
    columns: Mapping[str, Any] = field(default_factory=dict)  # other columns of a table's row, copied into the result

    @property
    def hash(self) -> str:
        """Return a digest of everything that the result of the line depends on."""
        text = json.dumps([self.kind, self.model, self.params], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def is_repeatable(self) -> bool:
        """Return whether identical lines have the same result.

        This holds for embeddings and single greedy completions.
        """
        return self.kind == "embed" or (self._is_greedy and self.params.get("n", 1) == 1)

    @property
    def _is_greedy(self) -> bool:
        return self.params.get("temperature") == 0 or self.params.get("top_k") == 1

    @property
    def key(self) -> str:
        """Return a sort key. If the prompts of two lines share a prefix, so do their keys."""
        return _key_of(self.kind, self.params)[:MAX_KEY_CHARS]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that can't become a job, with the reason."""

    number: int
    id: LineId | None
    message: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    lacks_model: bool = False  # neither the line nor the run names a model
    code: str = "invalid_request"


@dataclass(frozen=True, slots=True)
class Defaults:
    """The model and the parameters for lines that don't set them."""

    model: str | None
    params: Mapping[str, Any]


CheckLine = Callable[[int, dict[str, Any] | BadLine], None]


def read_lines(
    stream: BinaryIO,
    format_: Format,
    defaults: Defaults,
    max_bytes: int,
    columns: Columns = Columns(),
    check: CheckLine = lambda number, value: None,
) -> Iterator[BatchLine | BadLine]:
    """Yield each non-blank line of a file. A line whose job is larger than `max_bytes` becomes a BadLine.

    `check` is called with the number and the object of each JSON line before the line is validated, and may raise
    an error. Raises InvalidJob if the file does not have this format.
    """
    if columns.are_named and format_ not in ("csv", "parquet"):
        raise InvalidJob(f"--column and --id-column need CSV or Parquet, but the format is {format_}; leave them out")
    if format_ == "jsonl":
        for number, raw in raw_lines(stream, max_bytes):
            value = _object(number, raw)
            check(number, value)
            yield (
                value if isinstance(value, BadLine) else _within_limit(_from_object(number, value, defaults), max_bytes)
            )
        return
    for number, row in _rows(stream, format_, columns, max_bytes):
        if isinstance(row, BadLine):
            yield row
        else:
            line = _checked(number, row.id, "short", {"prompt": row.prompt}, defaults)
            yield _within_limit(replace(line, columns=row.columns), max_bytes)


def _within_limit(line: BatchLine | BadLine, max_bytes: int) -> BatchLine | BadLine:
    if isinstance(line, BadLine):
        return line
    num_over = line_bytes(line.kind, line.params) - max_lines_bytes(line.model, max_bytes)
    if num_over <= 0:
        return line
    message = _too_long(max_bytes + num_over, max_bytes)
    return BadLine(number=line.number, id=line.id, message=message, columns=line.columns)


def _too_long(size: int, limit: int) -> str:
    return f"the line has {size} bytes, and the limit is {limit}; split the line, or raise max_payload_bytes"


def format_of(path: Path | None, given: Format) -> Format:
    """Return the given format. For "auto", the suffix of the file determines it (default: jsonl)."""
    if given != "auto" or path is None:
        return "jsonl" if given == "auto" else given
    return _BY_SUFFIX.get(path.suffix.lower(), "jsonl")


def raw_lines(stream: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | str]]:
    """Yield the number and the bytes of each non-blank line.

    For an oversized line, yield an error instead of the bytes.
    """
    number = 0
    while raw := stream.readline(max_bytes + 1):
        number += 1
        if len(raw) > max_bytes and not raw.endswith(b"\n"):
            size = len(raw)
            while not raw.endswith(b"\n") and (raw := stream.readline(READ_BYTES)):
                size += len(raw)
            yield number, _too_long(size, max_bytes)
        elif raw.strip():
            yield number, raw


def _rows(
    stream: BinaryIO, format_: Format, columns: Columns, max_bytes: int
) -> Iterator[tuple[int, TableRow | BadLine]]:
    if format_ != "text":
        read = rows_of_csv if format_ == "csv" else rows_of_parquet
        yield from enumerate(read(stream, columns), start=1)
        return
    for number, raw in raw_lines(stream, max_bytes):
        try:
            text = raw.decode("utf-8-sig").rstrip("\r\n") if isinstance(raw, bytes) else BadLine(number, None, raw)
        except UnicodeDecodeError as error:
            text = BadLine(number, None, _not_utf8(error))
        yield number, text if isinstance(text, BadLine) else TableRow(str(number), text)


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"the line is not valid UTF-8 at byte {error.start}; convert the file to UTF-8"


def _object(number: int, raw: bytes | str) -> dict[str, Any] | BadLine:
    if isinstance(raw, str):
        return BadLine(number, None, raw, code="line_too_long")
    try:
        value = json.loads(raw.decode("utf-8-sig"))  # `loads` would guess the encoding of bytes
    except UnicodeDecodeError as error:
        return BadLine(number, None, _not_utf8(error), code="invalid_json_line")
    except (ValueError, RecursionError) as error:
        return BadLine(number, None, f"the line is not valid JSON: {error}", code="invalid_json_line")
    if not isinstance(value, dict):
        return BadLine(
            number,
            None,
            f"the line is of type {type(value).__name__}; it must be a JSON object",
            code="invalid_json_line",
        )
    return value


def _from_object(number: int, value: dict[str, Any], defaults: Defaults) -> BatchLine | BadLine:
    if "url" in value or "body" in value:
        return _from_openai(number, value, defaults)
    custom_id = value.pop(
        "custom_id", value.pop("id", f"line-{number}")
    )  # ids that count the lines of a file don't collide with it
    return _checked(number, custom_id, "short", value, defaults)


def _from_openai(number: int, value: dict[str, Any], defaults: Defaults) -> BatchLine | BadLine:
    custom_id = value.get("custom_id")
    if custom_id is None:
        return BadLine(number, None, "custom_id is missing; each line needs a unique custom_id")
    if not isinstance(custom_id, str) or not _is_id(custom_id):
        return BadLine(number, None, f"custom_id is {custom_id!r}; it must be a string")
    try:
        if value.get("method", "POST") != "POST":
            raise InvalidJob(f"method is {value['method']!r}; it must be POST")
        params = params_of_body(value.get("url"), value.get("body"))
    except InvalidJob as error:
        return BadLine(number, custom_id, str(error))
    return _checked(number, custom_id, "openai", params, defaults)


def _checked(number: int, custom_id: Any, form: Form, given: dict[str, Any], defaults: Defaults) -> BatchLine | BadLine:
    """Return the line if its job would be accepted, or else a BadLine with the reason."""
    if not _is_id(custom_id):
        return BadLine(number, None, f"id is {custom_id!r}; it must be a string or a whole number")
    found = [name for name in _KINDS if name in given]
    if len(found) != 1:
        actual = " and ".join(found) if found else "none of them"
        return BadLine(
            number, custom_id, f"a line must have exactly one of {', '.join(_KINDS)}; this line has {actual}"
        )
    kind, name = _KINDS[found[0]]
    params = {name: given[found[0]], **{key: value for key, value in given.items() if key != found[0]}}
    model = params.pop("model", None) or defaults.model
    if model is None:
        message = "model is missing; set it in the line, or for the whole run with --model"
        return BadLine(number, custom_id, message, lacks_model=True)
    known = LINE_JOBS[kind].model_fields
    params = {**{key: value for key, value in defaults.params.items() if key in known}, **params}
    try:
        if "priority" in params or "stream" in params:
            raise InvalidJob("priority and stream are not supported in bulk runs; leave them out")
        parse_job(LINE_JOBS[kind], (), (), {**params, "model": model, "priority": PRIORITY_BULK})
    except InvalidJob as error:
        return BadLine(number, custom_id, str(error))
    return BatchLine(number=number, id=custom_id, form=form, kind=kind, model=model, params=params)


def _is_id(value: Any) -> bool:
    """Return whether the value is a whole number, or a string that can be encoded (JSON allows lone surrogates)."""
    if not isinstance(value, str):
        return isinstance(value, int) and not isinstance(value, bool)
    try:
        return bool(value.encode())
    except UnicodeEncodeError:
        return False


def _key_of(kind: LineKind, params: Mapping[str, Any]) -> str:
    if kind == "chat":
        head = json.dumps([params.get("tools"), params.get("template_args")]) if params.get("tools") else ""
        return head + "\n".join(f"{turn.get('role')}\x02{turn.get('content')}" for turn in params["messages"])
    if kind == "embed":
        return ""  # embeddings share no prefix
    prompt = params["prompt"]
    return prompt if isinstance(prompt, str) else "".join(chr(0x10000 + token % 0xF0000) for token in prompt)


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A line as it is stored in the work file."""

    number: int
    id: LineId
    form: str
    kind: LineKind
    model: str
    params: dict[str, Any]
    tries: int
    place: int | None  # index in its chunk
    state: int
    columns: dict[str, Any] = field(default_factory=dict)  # other columns of a table's row, copied into the result


def rows_of_csv(stream: BinaryIO, columns: Columns) -> Iterator[TableRow]:
    """Yield the rows of a CSV file. Raises InvalidJob."""
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
        raise InvalidJob(f"can't read the CSV file after row {number}: {error}; it must be CSV in UTF-8") from None
    finally:
        text.detach()  # leave the stream open, because the caller closes it


def rows_of_parquet(stream: BinaryIO, columns: Columns) -> Iterator[TableRow]:
    """Yield the rows of a Parquet file. Raises InvalidJob."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InvalidJob("missing packages: pyarrow; run `pip install 'cellama[parquet]'`") from None
    number = 0
    try:
        file = ParquetFile(stream)
        prompt, row_id = _chosen(columns, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield _row(row, number, prompt, row_id)
    except (ArrowException, OSError) as error:  # a pipe can't be read from its end
        raise InvalidJob(
            f"can't read the Parquet file after row {number}: {error}; it must be a file, not stdin"
        ) from None


def _row(row: dict[str, Any], number: int, prompt: str, row_id: str | None) -> TableRow:
    others = {name: _plain(value) for name, value in row.items() if name not in (prompt, row_id)}
    return TableRow(str(number) if row_id is None else _id(row[row_id]), _text(row[prompt]), others)


def _id(value: Any) -> str | int:
    """Return the id of a row. Whole numbers remain numbers, and other values become strings."""
    return value if isinstance(value, int) and not isinstance(value, bool) else _text(value)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _plain(value: Any) -> Any:
    """Return the value unchanged if JSON supports its type. Convert other values, such as times, to text."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


def _chosen(columns: Columns, names: list[str]) -> tuple[str, str | None]:
    """Return the names of the prompt column and the id column. Raises InvalidJob."""
    row_id = columns.id or next((name for name in names if name.lower() in ID_COLUMNS), None)
    if row_id is not None and row_id not in names:
        raise InvalidJob(f"--id-column: there is no column {row_id!r}; columns: {_listed(names)}")
    others = [name for name in names if name != row_id]
    prompt = others[0] if columns.prompt is None and len(others) == 1 else columns.prompt
    if prompt not in names or (columns.prompt is None and _other_separator(names)):
        problem = "name the column of the prompts" if columns.prompt is None else f"there is no column {prompt!r}"
        raise InvalidJob(f"--column: {problem}; columns: {_listed(names)}{_separator_hint(names)}")
    return prompt, None if row_id == prompt and columns.id is None else row_id


def _other_separator(names: list[str]) -> str:
    """Return the character, other than a comma, that seems to separate columns, or "" if there is none."""
    return next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), "")


def _separator_hint(names: list[str]) -> str:
    mark = _other_separator(names)
    return f"; the file seems to use the separator {mark!r}, but must use commas" if mark else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"

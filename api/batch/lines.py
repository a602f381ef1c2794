"""Turn an input's lines and rows into jobs, and check each job before it is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cellama.api.openai.bodies import params_of_body
from cellama.api.openai.parameters import PARAMETERS
from cellama.api.openai.reranking import RERANK, params_of_rerank
from cellama.api.openai.responses.batched import params_of_line
from cellama.api.openai.responses.parameters import RESPONSES
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.kinds.chunk import LINE_JOBS, LineKind, line_bytes, max_lines_bytes
from cellama.tasks.contract.names import PRIORITY_BULK, model_named
from cellama.tasks.contract.payloads import parse_job

from .formats import Format
from .rows import BadInputRow, InputData, InputRow, rows_of, too_long
from .templates import RowTemplate, text_of

Form = Literal["openai", "short"]
LineId = str | int  # as in the input: 7 and "7" are different ids
AsKind = Literal["chat", "prompt", "embed"]  # what a row becomes
_KINDS: dict[str, tuple[LineKind, str]] = {  # field of a short line → kind of its job, and name of the parameter
    "prompt": ("generate", "prompt"),
    "messages": ("chat", "messages"),
    "text": ("embed", "texts"),
    "texts": ("embed", "texts"),
    "documents": ("rerank", "documents"),
}
MAX_KEY_CHARS = 4096  # length of a prompt in a sort key: prompts with a longer common prefix are adjacent anyway
ID_COLUMNS = ("custom_id", "id")  # names of the id column if none is given


@dataclass(frozen=True, slots=True)
class RowMapping:
    """Defines how a row's columns become a job.

    The prompt is the filled `template` if there is one, otherwise the `column`, otherwise the only column except the
    id. If `id` is not set, a column in ID_COLUMNS is used if one exists. With `keeps_all`, results keep all columns, as
    tables require.
    """

    column: str | None = None
    id: str | None = None
    template: RowTemplate | None = None
    as_kind: AsKind | None = None
    keeps_all: bool = False

    @property
    def is_given(self) -> bool:
        """Return whether JSON objects are rows instead of job parameters."""
        return self.column is not None or self.template is not None or self.as_kind is not None


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A valid line. `params` contains the job's parameters, and line numbers start at 1."""

    number: int
    id: LineId
    form: Form
    kind: LineKind
    model: str
    params: Mapping[str, Any]
    columns: Mapping[str, Any] = field(default_factory=dict)  # other columns of a table's row, copied into the result
    request: Mapping[str, Any] = field(default_factory=dict)  # `url` and `body`, if the answer repeats parts of them

    @property
    def hash(self) -> str:
        """Return a digest of all values that the line's result depends on."""
        parts = [self.kind, self.model, self.params, *([self.request] if self.request else [])]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def is_repeatable(self) -> bool:
        """Return whether identical lines always produce the same result.

        Identical requests produce the same result if they are embedding, ranking or greedy single-completion requests.
        """
        return self.kind in ("embed", "rerank") or (self._is_greedy and self.params.get("n", 1) == 1)

    @property
    def _is_greedy(self) -> bool:
        return self.params.get("temperature") == 0 or self.params.get("top_k") == 1

    @property
    def key(self) -> str:
        """Return a line's sort key. Lines whose prompts share a prefix have sort keys that share a prefix."""
        return _key_of(self.kind, self.params)[:MAX_KEY_CHARS]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that can't become a job, and the reason why."""

    number: int
    id: LineId | None
    message: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    lacks_model: bool = False  # neither the line nor the run names a model
    code: str = "invalid_request"


@dataclass(frozen=True, slots=True)
class Defaults:
    """The default model and the default parameters of a run's lines."""

    model: str | None
    params: Mapping[str, Any]


CheckLine = Callable[[int, dict[str, Any] | BadLine], None]


def read_lines(
    data: InputData,
    format_: Format,
    defaults: Defaults,
    max_bytes: int,
    mapping: RowMapping = RowMapping(),
    check: CheckLine = lambda number, value: None,
    chosen: Container[int] | None = None,
) -> Iterator[BatchLine | BadLine]:
    """Yield each line or row of an input. A line whose job is larger than `max_bytes` becomes a BadLine.

    If `chosen` is given, only lines whose zero-based indexes are in `chosen` are read. `check` is called with each JSON
    line's number and object before the line is validated, and may raise an error. Raises InvalidJob if the input does
    not have this format or lacks a column.
    """
    if format_ == "jsonl" and mapping.id is not None and not mapping.is_given:
        raise InvalidJob(
            "--id-column: JSON lines have their id in `id`; add --column or --template to read them as rows"
        )
    jobs: RowJobs | None = None
    for index, row in enumerate(rows_of(data, format_, max_bytes)):
        if chosen is not None and index not in chosen:
            continue
        if isinstance(row, BadInputRow):
            bad = BadLine(row.number, None, row.message, code=row.code)
            if format_ == "jsonl":
                check(row.number, bad)
            yield bad
        elif format_ == "jsonl" and not mapping.is_given:
            check(row.number, dict(row.values))
            line = _within_limit(_from_object(row.number, row.values, defaults, mapping), max_bytes)
            yield _for_table(line) if mapping.keeps_all else line
        else:
            if jobs is None:
                jobs = RowJobs(mapping, list(row.values), format_, defaults)
            line = _within_limit(jobs.line_of(row), max_bytes)
            yield _for_table(line) if mapping.keeps_all else line


def _within_limit(line: BatchLine | BadLine, max_bytes: int) -> BatchLine | BadLine:
    if isinstance(line, BadLine):
        return line
    num_over = line_bytes(line.kind, line.params) - max_lines_bytes(line.model, max_bytes)
    if num_over <= 0:
        return line
    message = too_long(max_bytes + num_over, max_bytes)
    return BadLine(number=line.number, id=line.id, message=message, columns=line.columns)


class RowJobs:
    """Turns rows into jobs. The columns are chosen based on the first row."""

    def __init__(self, mapping: RowMapping, names: list[str], format_: Format, defaults: Defaults) -> None:
        """Choose the columns. Raises InvalidJob if a column is missing."""
        self._defaults = defaults
        self._keeps_all = mapping.keeps_all
        self._template = mapping.template
        self._prefix = "line-" if format_ == "jsonl" else ""  # of ids that count rows
        self._kind = mapping.as_kind or ("prompt" if defaults.params.get("system") is None else "chat")
        if self._kind != "chat" and defaults.params.get("system") is not None:
            raise InvalidJob(f"system: only chats can have a system message, but --as is {self._kind}; use --as chat")
        given = "path" if format_ == "directory" and mapping.id is None else mapping.id
        self._id = given or next((name for name in names if name.lower() in ID_COLUMNS), None)
        if self._id is not None and self._id not in names:
            raise InvalidJob(f"--id-column: unknown column {self._id!r}; columns: {_listed(names)}")
        self._column = ""
        if self._template is None:
            self._column = self._chosen(mapping.column, names)
            if self._id == self._column and mapping.id is None:
                self._id = None
        elif missing := [name for name in self._template.names if name not in names]:
            raise InvalidJob(f"--template: unknown column {missing[0]!r}; columns: {_listed(names)}")

    def _chosen(self, column: str | None, names: list[str]) -> str:
        others = [name for name in names if name != self._id]
        prompt = others[0] if column is None and len(others) == 1 else column
        if prompt not in names or (column is None and _other_separator(names)):
            problem = "name the column of the prompts" if column is None else f"unknown column {prompt!r}"
            hint = ", or use --template" if column is None else ""
            raise InvalidJob(f"--column: {problem}{hint}; columns: {_listed(names)}{_separator_hint(names)}")
        return prompt

    def line_of(self, row: InputRow) -> BatchLine | BadLine:
        """Return a row's job, or a BadLine with the reason why the row can't become a job."""
        values = row.values
        line_id = f"{self._prefix}{row.number}" if self._id is None else _id(values.get(self._id))
        if self._keeps_all:
            columns = dict(values) if self._id is not None else {"id": line_id, **values}
        else:
            columns = {name: value for name, value in values.items() if name not in (self._id, self._column)}
        try:
            content = values[self._column] if self._template is None else self._template.render(values)
        except KeyError as error:
            message = f"the row has no column {error.args[0]!r}; add it, or leave the row out"
            return BadLine(row.number, line_id, message, columns=columns)
        line = _checked(row.number, line_id, "short", self._job(content), self._defaults)
        return replace(line, columns=columns)

    def _job(self, content: Any) -> dict[str, Any]:
        if self._kind == "chat":
            messages = content if isinstance(content, list) else [{"role": "user", "content": text_of(content)}]
            return {"messages": messages}
        return {"text" if self._kind == "embed" else "prompt": text_of(content)}


def _from_object(number: int, value: Mapping[str, Any], defaults: Defaults, mapping: RowMapping) -> BatchLine | BadLine:
    given = dict(value)
    if "url" in value or "body" in value:
        line = _from_openai(number, given, defaults)
    else:  # ids that count the lines of a file don't collide with ids in it
        custom_id = given.pop("custom_id", given.pop("id", f"line-{number}"))
        line = _checked(number, custom_id, "short", given, defaults)
    if mapping.keeps_all:
        line = replace(line, columns=value if "custom_id" in value or "id" in value else {"id": line.id, **value})
    return line


def _for_table(line: BatchLine | BadLine) -> BatchLine | BadLine:
    """Return a BadLine if a line asks for several results, because an output row can hold only one result."""
    if isinstance(line, BadLine):
        return line
    if line.kind == "rerank":
        message = "documents: a row of a table can't hold a ranking; write results to a .jsonl file"
        return BadLine(line.number, line.id, message, columns=line.columns)
    texts = line.params.get("texts")
    has_texts = isinstance(texts, list) and len(texts) > 1 and not isinstance(texts[0], int)
    if line.params.get("n", 1) == 1 and not has_texts:
        return line
    message = f"{'texts' if has_texts else 'n'}: a row of a table has only one result; write results to a .jsonl file"
    return BadLine(line.number, line.id, message, columns=line.columns)


def _from_openai(number: int, value: dict[str, Any], defaults: Defaults) -> BatchLine | BadLine:
    custom_id = value.get("custom_id")
    if custom_id is None:
        return BadLine(number, None, "custom_id is missing; each line needs a unique custom_id")
    if not isinstance(custom_id, str) or not _is_id(custom_id):
        return BadLine(number, None, f"custom_id is {custom_id!r}; it must be a string")
    try:
        if value.get("method", "POST") != "POST":
            raise InvalidJob(f"method is {value['method']!r}; it must be POST")
        url, body = value.get("url"), value.get("body")
        if url in _READERS and isinstance(body, dict):
            params, request = _READERS[url](body), {"url": url, "body": _repeated(body)}
        else:
            params, request = params_of_body(url, body, (*PARAMETERS, *_READERS)), {}
    except InvalidJob as error:
        return BadLine(number, custom_id, str(error))
    line = _checked(number, custom_id, "openai", params, defaults)
    return replace(line, request=request) if request and isinstance(line, BatchLine) else line


def _rerank_params(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**params_of_rerank(body), "model": body.get("model")}


def _repeated(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body without its large members, which the job's parameters already contain."""
    return {name: value for name, value in body.items() if name not in ("input", "documents", "query")}


_READERS: Mapping[Any, Callable[[Mapping[str, Any]], dict[str, Any]]] = {  # URLs whose answers repeat the request
    RESPONSES: params_of_line,
    RERANK: _rerank_params,
}


def _checked(number: int, custom_id: Any, form: Form, given: dict[str, Any], defaults: Defaults) -> BatchLine | BadLine:
    """Return the line if its job would be accepted, otherwise a BadLine with the reason."""
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
    model = model_named(model) if isinstance(model, str) else model
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
    """Return whether the value is an integer, or a string that UTF-8 can encode (JSON allows lone surrogates)."""
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
    if kind in ("embed", "rerank"):
        return ""  # embeddings share no prefix
    prompt = params["prompt"]
    return prompt if isinstance(prompt, str) else "".join(chr(0x10000 + token % 0xF0000) for token in prompt)


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A line as stored in the work file."""

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
    request: dict[str, Any] = field(default_factory=dict)  # `url` and `body`, if the answer repeats parts of them


def _id(value: Any) -> str | int:
    """Return a row's id. Integers are returned unchanged, and other values are converted to strings."""
    return value if isinstance(value, int) and not isinstance(value, bool) else text_of(value)


def _other_separator(names: list[str]) -> str:
    """Return the column separator if it does not seem to be a comma, otherwise ""."""
    return next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), "")


def _separator_hint(names: list[str]) -> str:
    mark = _other_separator(names)
    remedy = "must use commas" if mark != "\t" else "must use commas; add --format tsv"
    return f"; the file seems to use the separator {mark!r}, but {remedy}" if mark else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"

"""Write the results and errors of a run's lines.

Each output line is fully written to disk before the work file counts the line as finished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cellama.api.openai.answers import body_of, embeddings_of, failure_of, response_of
from cellama.api.openai.reranking import ranking_of, returns_documents
from cellama.api.openai.responses.batched import response_of_line
from cellama.api.openai.responses.parameters import RESPONSES
from cellama.tasks.contract.kinds.chat import with_messages

from .lines import BadLine, LineId, StoredLine
from .options import TOKENS, Progress
from .work import TWIN, WorkFile

_BLOCK = 1 << 16
_ESCAPED = {code: f"\\u{code:04x}" for code in (0x7F, *range(0x80, 0xA0))}  # `json` escapes the codes below 0x20


def json_for_terminal(text: str) -> str:
    """Return the JSON with all control characters in its strings escaped.

    A terminal would interpret these characters.
    """
    return text.translate(_ESCAPED)


class LineFile:
    """Appends JSON lines to a file."""

    def __init__(self, path: Path, echo: int | None = None) -> None:
        """Open or create the file. Cut off an incomplete last line left by a crash. Raises OSError.

        Appended lines are also written to the open file `echo`.
        """
        self.path = path
        self._echo = echo
        self._is_on_terminal = echo is not None and os.isatty(echo)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, _end_of_whole_lines(self._fd))
        self.size = os.lseek(self._fd, 0, os.SEEK_END)
        self.count = 0  # lines appended by this object

    def append(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Append lines, and return when they are on disk.

        If an OSError is raised, the file contains none of the new lines.
        """
        if not values:
            return
        text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
        data = text.encode()
        try:
            _write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.size)  # remove an incomplete line
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += len(data)
        self.count += len(values)
        if self._echo is not None:
            _write_all(self._echo, json_for_terminal(text).encode() if self._is_on_terminal else data)

    def lines(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the lines, starting at byte `start`."""
        with self.path.open("rb") as file:
            file.seek(start)
            for raw in file:
                yield json.loads(raw)

    def close(self) -> None:
        os.close(self._fd)


def _write_all(fd: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]


def _end_of_whole_lines(fd: int) -> int:
    end = os.lseek(fd, 0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        block = os.pread(fd, end - start, start)
        at = block.rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def rewrite_without(path: Path, drops: Callable[[Any], bool]) -> None:
    """Remove the lines whose ids make `drops` return True.

    After a crash, either all or none of the selected lines are removed.
    """
    partial = path.with_name(path.name + ".part")
    with path.open("rb") as old, partial.open("wb") as new:
        for raw in old:
            if not drops(id_of(json.loads(raw))):
                new.write(raw)
        new.flush()
        os.fsync(new.fileno())
    partial.replace(path)


def id_of(value: Mapping[str, Any]) -> Any:
    """Return the id from an output line in the `openai` or `short` format."""
    return value.get("custom_id", value.get("id"))


_RESULT_FIELDS = tuple(
    "finish_reason stop_sequence choices logprobs shapes usage model seed finish_key warnings".split()
)


def result_line(line: StoredLine, result: dict[str, Any]) -> dict[str, Any]:
    """Return the output line for a result."""
    shaped: Any = with_messages(result) if line.kind == "chat" else result
    if line.form == "openai":
        return {**response_of(line.id, _request_id(line), _body(line, shaped)), **_columns(line.columns)}
    names = {"generate": ("text",), "chat": ("message",), "embed": ("embeddings",), "rerank": ("results",)}[line.kind]
    fields = {name: shaped[name] for name in (*names, *_RESULT_FIELDS) if shaped.get(name) is not None}
    return {"id": line.id, **fields, **_columns(line.columns)}


def _body(line: StoredLine, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response body that the line's endpoint would return."""
    body = line.request.get("body", {})
    if line.request.get("url") == RESPONSES:
        return response_of_line(_request_id(line), body, line.params, result)
    if line.kind == "rerank":
        return ranking_of(result, line.params["documents"] if returns_documents(body) else None)
    return embeddings_of(result) if line.kind == "embed" else body_of(line.kind, _request_id(line), [result])


def usage_of_line(value: Mapping[str, Any]) -> dict[str, int]:
    """Return the token counts from an output line in the `openai` or `short` format."""
    if "response" not in value:
        usage = value.get("usage") or {}
        return {name: usage.get(name, 0) for name in TOKENS}
    usage = value["response"]["body"].get("usage") or {}
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    num_prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))  # responses have names of their own
    num_completion = usage.get("completion_tokens", usage.get("output_tokens", 0))
    counts = (num_prompt, details.get("cached_tokens", 0), num_completion)
    return dict(zip(TOKENS, counts, strict=True))


def error_line(line: StoredLine, error: Mapping[str, Any]) -> dict[str, Any]:
    """Return the error file's entry for a line whose job failed."""
    return {**_numbered(line.form, line.number, line.id, _request_id(line), error), **_columns(line.columns)}


def bad_line(form: str, bad: BadLine) -> dict[str, Any]:
    """Return the error file's entry for a line that could not become a job."""
    error = {"code": "invalid_request", "message": bad.message}
    return {**_numbered(form, bad.number, bad.id, f"line_{bad.number}", error), **_columns(bad.columns)}


def _columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {"columns": columns} if columns else {}


def _numbered(
    form: str, number: int, line_id: LineId | None, request_id: str, error: Mapping[str, Any]
) -> dict[str, Any]:
    if form == "openai":
        return {**failure_of(line_id, request_id, error), "line": number}
    return {"id": line_id, "line": number, "error": {"code": error["code"], "message": error["message"]}}


def _request_id(line: StoredLine) -> str:
    return f"line_{line.number}"


LINES_PER_WRITE = 1000  # lines finished without a worker: a few MB of memory
OutcomeList = list[tuple[StoredLine, dict[str, Any]]]  # lines with their results, or with their errors


class Outcomes:
    """Writes and counts each line's outcome exactly once. Each instance is used by only one thread."""

    def __init__(
        self,
        work: WorkFile,
        output: LineFile | None,
        errors: LineFile,
        progress: Progress,
        *,
        ordered: bool = False,
        drops_columns: bool = False,
    ) -> None:
        """Write results as they arrive, or in input order if `ordered` is true.

        Without an output, results stay in the work file. With `drops_columns`, results don't repeat the input's
        columns.
        """
        self._work = work
        self._output = output
        self._errors = errors
        self._progress = progress
        self._ordered = ordered
        self._drops_columns = drops_columns
        self._first_open: int | None = 0 if ordered else None  # number of the first unfinished line; None: in any order
        self._merges = work.count(TWIN) > 0

    def save(self, results: OutcomeList, failures: OutcomeList) -> None:
        """Write outcomes, and copy each outcome to the line's twins.

        The output is written before the work file. After a crash between these writes, the next command finds the
        missing results at the end of the output.
        """
        self._write(results, failures, computed=results)
        if self._merges:
            for line, result in results:
                while twins := self._work.twins(line, LINES_PER_WRITE):
                    self._write([(twin, result) for twin in twins], [])
            for line, error in failures:
                while twins := self._work.twins(line, LINES_PER_WRITE):
                    self._write([], [(twin, error) for twin in twins])

    def _write(self, results: OutcomeList, failures: OutcomeList, computed: OutcomeList | tuple[()] = ()) -> None:
        """Write outcomes.

        Only the results in `computed` count toward the token totals, because other results are copies.
        """
        tokens = {
            name: getattr(self._progress, name) + sum(result["usage"][name] for _, result in computed)
            for name in TOKENS
        }
        outcomes = [(line, self._result_line(line, result)) for line, result in results]
        is_held = self._ordered or self._output is None
        if self._output is not None and not is_held:
            self._output.append([outcome for _, outcome in outcomes])
        self._errors.append([error_line(line, error) for line, error in failures])
        with self._work.transaction():
            for line, outcome in outcomes:
                held = json.dumps(outcome, ensure_ascii=False) if is_held else None
                self._work.finish(line, outcome=held)
            for line, _ in failures:
                self._work.finish(line, failed=True)
            output_size = 0 if self._output is None else self._output.size
            self._work.set(output_size=output_size, errors_size=self._errors.size, **tokens)
        for name, count in tokens.items():
            setattr(self._progress, name, count)
        self._progress.finished += len(results)
        self._progress.failed += len(failures)
        self._progress.in_flight = self._work.in_flight()
        if self._ordered:
            self.write_held()

    def _result_line(self, line: StoredLine, result: dict[str, Any]) -> dict[str, Any]:
        return result_line(replace(line, columns={}) if self._drops_columns else line, result)

    def write_held(self) -> None:
        """Write held results up to the first unfinished line, or all held results if the order no longer matters."""
        if self._output is None:
            return
        if self._first_open is not None:
            self._first_open = self._work.first_open(self._first_open)
        while held := self._work.held(LINES_PER_WRITE, self._first_open):
            self._output.append([json.loads(outcome) for _, outcome in held])
            with self._work.transaction():
                self._work.drop_outcomes(number for number, _ in held)
                self._work.set(output_size=self._output.size)

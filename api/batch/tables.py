"""Write a run's results to a table or to a compressed file in input order."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .arrow_process import write_arrow
from .formats import COLUMNAR, OutputKind
from .sources import Source, compressed
from .templates import text_of
from .work import WorkFile

# Columns of results, with their types in Parquet and Arrow. Only the embedding has a type that depends on its model.
TYPES = {"output": "string", "finish_reason": "string", "prompt_tokens": "int64", "completion_tokens": "int64"}
EMBEDDING = "embedding"
_OF_TEXT = ("output", "finish_reason", "prompt_tokens", "completion_tokens")
_OF_EMBEDDING = (EMBEDDING, "prompt_tokens")
_ORDER = ("output", EMBEDDING, "finish_reason", "prompt_tokens", "completion_tokens")
ID = "id"  # column that a table gets if the input has no ids (RowJobs)
PREFIX = "cellama_"  # of the column of a result if the input has a column with its name


def write_results(work: WorkFile, path: Path, kind: OutputKind, source: Source, format_: str) -> None:
    """Write all results of a work file to `path`. After a crash, the output file is either complete or unchanged.

    `source` is the input, and `format_` is its format. Parquet and Arrow inputs are read again so that their columns
    keep their types. Raises OSError.
    """
    partial = path.with_name(path.name + ".part")
    try:
        if not kind.is_table:
            with compressed(partial, kind.compression) as file:
                for _, _, outcome in work.results():
                    file.write(outcome.encode() + b"\n")
        else:
            names = _names_of_results(work)
            if kind.format in COLUMNAR:
                again = {"path": str(source), "format": format_} if format_ in COLUMNAR else None
                _write_arrow(work, partial, kind, names, again)
            else:
                _write_text(work, partial, kind, names)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _names_of_results(work: WorkFile) -> dict[str, str]:
    """Return the result columns in order, as a mapping from result names to column names."""
    kinds = set(work.kinds())
    wanted = {*(_OF_TEXT if kinds - {"embed"} else ()), *(_OF_EMBEDDING if "embed" in kinds else ())}
    taken = {name for _, columns, _ in work.results() for name in columns}
    names = {}
    for name in _ORDER:
        if name in wanted:
            column = name
            while column in taken:
                column = PREFIX + column
            names[name] = column
    return names


def flat_rows(work: WorkFile, names: Mapping[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each result's number and columns, starting with the input columns."""
    for number, columns, outcome in work.results():
        values = values_of(json.loads(outcome))
        yield number, {**columns, **{column: values[name] for name, column in names.items()}}


def values_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result's values keyed by column. Missing values are None."""
    usage = result.get("usage") or {}
    message = result.get("message")
    text = result.get("text")
    if message is not None:
        calls = message.get("tool_calls")
        text = message.get("content") or (text_of(calls) if calls else message.get("content") or "")
    vectors = result.get("embeddings")
    return {
        "output": text,
        EMBEDDING: None if vectors is None else vectors[0],
        "finish_reason": result.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": None if vectors is not None else usage.get("completion_tokens"),
    }


def _write_arrow(
    work: WorkFile,
    path: Path,
    kind: OutputKind,
    names: Mapping[str, str],
    source: Mapping[str, str] | None,
) -> None:
    options = {
        "path": str(path),
        "directory": str(path.parent),
        "format": kind.format,
        "input": source,
        "columns": list(names.values()),
        "types": {column: TYPES[name] for name, column in names.items() if name in TYPES},
        EMBEDDING: names.get(EMBEDDING, ""),
        "id": ID,
    }
    rows = flat_rows(work, names)
    if source is not None:  # the process reads the columns of the input itself
        added = (ID, *names.values())
        rows = ((number, {name: row[name] for name in added if name in row}) for number, row in rows)
    write_arrow(options, rows)


def _write_text(work: WorkFile, path: Path, kind: OutputKind, names: Mapping[str, str]) -> None:
    with compressed(path, kind.compression) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
        if kind.format == "rows":
            text.writelines(json.dumps(row) + "\n" for _, row in flat_rows(work, names))
            return
        columns = dict.fromkeys(name for _, row, _ in work.results() for name in row)
        header = [*columns, *names.values()]
        writer = csv.writer(text, delimiter="\t" if kind.format == "tsv" else ",", lineterminator="\n")
        writer.writerow(header)
        for _, row in flat_rows(work, names):
            writer.writerow([text_of(row.get(name)) for name in header])

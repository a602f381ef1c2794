"""Every input format with every output format: the same results, with the columns and the types of the input.

`CELLAMA_BULK_ROWS=1000` runs the table with this many rows instead of a few.
"""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, parquet

from cellama.api.machine.redis_server import RedisServer

from ...conftest import WorkerProcess
from .conftest import ANIMALS, Commands

NUM_ROWS = int(os.environ.get("CELLAMA_BULK_ROWS", "5"))
NUM_PROMPTS = 50  # different ones, so that the models compute little and the formats do the work
INPUTS = ("jsonl", "csv", "tsv", "parquet", "arrow", "txt")
OUTPUTS = ("jsonl", "csv", "parquet", "arrow")
GREEDY = ("--max-tokens", "3", "--temperature", "0", "--ignore-eos", "--merge-identical")
OPTIONS = ("--as", "chat", "--system", "Be brief.", *GREEDY)


def rows_of_input() -> list[dict[str, Any]]:
    titles = [f'The {ANIMALS[i % 5]}, "{i % NUM_PROMPTS}" é' for i in range(NUM_ROWS)]
    return [{"id": 7 + i, "title": title, "score": i / 4} for i, title in enumerate(titles)]


def write_input(path: Path) -> list[dict[str, Any]]:
    """Write the rows in the format of the path, and return them with the types that the format has."""
    rows = rows_of_input()
    kind = path.suffix[1:]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind in ("csv", "tsv"):
        rows = [{name: str(value) for name, value in row.items()} for row in rows]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "txt":
        path.write_text("".join(f"{row['title']}\n" for row in rows))
        rows = [{"id": str(number), "text": row["title"]} for number, row in enumerate(rows, start=1)]
    else:
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, path) if kind == "parquet" else feather.write_feather(table, path)
    return rows


def read_output(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    table = parquet.read_table(path) if path.suffix == ".parquet" else feather.read_table(path)
    return list(table.to_pylist())


def as_text(row: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) for name, value in row.items()}


@pytest.fixture(scope="module")
def expected(
    shared_worker: WorkerProcess, redis_server: RedisServer, shared_model: str, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Return the answer to each row."""
    commands = Commands(tmp_path_factory.mktemp("expected"), redis_server.url, shared_model)
    contents = [f"{{{row['title']}}}" for row in rows_of_input()]
    commands.write([{"messages": [{"role": "user", "content": content}]} for content in contents])
    assert commands.run("--order", "input", *OPTIONS[2:]) == 0, commands.log()
    return [each["message"]["content"] for each in commands.results()]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("input", INPUTS)
def test_each_input_format_yields_the_same_answers_in_each_output_format(
    input: str, output: str, commands: Commands, model: str, expected: list[str]
) -> None:
    source, target = commands.folder / f"in.{input}", commands.folder / f"out.{output}"
    rows = write_input(source)
    template = "{{{text}}}" if input == "txt" else "{{{title}}}"
    argv = ("run", source.name, "-o", target.name, "-m", model, "--template", template, "--order", "input", *OPTIONS)
    assert commands.call(*argv) == 0, commands.log()
    found = read_output(target)
    if output == "jsonl":
        assert [(each["id"], each["message"]["content"]) for each in found] == [
            (row["id"], text) for row, text in zip(rows, expected, strict=True)
        ]
        others = [{name: row[name] for name in row if name != "id"} for row in rows]
        assert [each["columns"] for each in found] == others
    else:
        own = [{name: each[name] for name in rows[0]} for each in found]
        assert own == ([as_text(row) for row in rows] if output == "csv" else rows)
        assert [each["output"] for each in found] == expected
        assert list(found[0])[-4:] == ["output", "finish_reason", "prompt_tokens", "completion_tokens"]
    assert sorted(path.name for path in commands.folder.iterdir()) == sorted(["command.log", source.name, target.name])

"""Tables as input and output: types, embeddings, failed rows, and runs that are interrupted or repeated."""

from __future__ import annotations

import csv
import gzip
import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, parquet
from redis import Redis

from cellama.tasks.state.bulk_runs import Batches

from ...conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import Commands, StartWorker

GREEDY = ("--temperature", "0", "--ignore-eos", "--max-tokens")


def write_table(path: Path, count: int = 4, **more: Any) -> pyarrow.Table:
    """Write a table with columns of several types."""
    columns = {
        "key": pyarrow.array(range(count), pyarrow.int32()),
        "title": [f"A little fox {i}" for i in range(count)],
        "at": [datetime(2026, 1, 1 + i % 20) for i in range(count)],
        "price": [Decimal("1.50")] * count,
        "tags": [["a", "b"]] * count,
        "topic": pyarrow.array(["x", "y"] * (count // 2)).dictionary_encode(),
        **more,
    }
    table = pyarrow.table(columns)
    parquet.write_table(table, path)
    return table


@pytest.mark.parametrize("output", ["out.parquet", "out.arrow"])
def test_table_keeps_column_types_and_contains_fixed_size_embeddings(
    worker: WorkerProcess, commands: Commands, model: str, output: str
) -> None:
    table = write_table(commands.folder / "in.parquet")
    argv = ("run", "in.parquet", "-o", output, "-m", model, "--as", "embed", "--column", "title", "--id-column", "key")
    assert commands.call(*argv) == 0, commands.log()
    path = commands.folder / output
    found = parquet.read_table(path) if output.endswith("parquet") else feather.read_table(path)
    own = found.select(table.schema.names)
    assert own.to_pylist() == table.to_pylist()
    kept = [field.type for field in table.schema if output == "out.parquet" or field.name != "topic"]
    assert [field.type for field in own.schema if output == "out.parquet" or field.name != "topic"] == kept
    assert found.schema.names == [*table.schema.names, "embedding", "prompt_tokens"]
    assert found.schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), 192)


def test_table_run_loses_no_row_when_command_and_worker_are_killed(
    start_worker: StartWorker, commands: Commands, model: str, redis_client: Redis
) -> None:
    worker = start_worker()
    write_table(commands.folder / "in.parquet", 60)
    argv = ("run", "in.parquet", "-o", "out.parquet", "-m", model, "--column", "title", "--json", *GREEDY, "8")
    with worker.slowed(0.1):
        command = commands.start(*argv)
        wait_until(lambda: any(run.get("finished", 0) >= 4 for run in Batches(redis_client).all()
                               if run["output"] == str(commands.folder / "out.parquet")), "results")  # fmt: skip
        command.kill()
        command.wait()
        worker.process.kill()
        worker.process.wait()
    assert not (commands.folder / "out.parquet").exists()
    start_worker()
    assert commands.start(*argv).wait(PATIENCE_S) == 0, commands.log()
    found = parquet.read_table(commands.folder / "out.parquet").to_pylist()
    assert [row["id"] for row in found] == [str(number) for number in range(1, 61)]
    assert all(row["completion_tokens"] == 8 for row in found)
    assert commands.end()["completion_tokens"] == 8 * 60
    assert {path.suffix for path in commands.folder.iterdir() if path.is_file()} == {".log", ".parquet"}


def test_repeated_command_reports_that_the_run_is_complete(
    worker: WorkerProcess, commands: Commands, model: str
) -> None:
    (commands.folder / "in.csv").write_text("id,title\n1,Fox\n2,Bee\n")
    argv = ("run", "in.csv", "-o", "out.csv", "-m", model, *GREEDY, "2")
    assert commands.call(*argv) == 0, commands.log()
    before = (commands.folder / "out.csv").stat().st_mtime_ns
    for count, again in enumerate((argv, ("resume", "out.csv")), start=1):
        assert commands.call(*again) == 0
        assert commands.words().count("already completed: 2 lines done, 0 failed") == count
    assert (commands.folder / "out.csv").stat().st_mtime_ns == before
    (commands.folder / "in.csv").write_text("id,title\n1,Fox\n2,Cat\n")
    assert commands.call(*argv) == 2
    assert "'out.csv' exists, but is not the output of an unfinished run" in commands.words()
    assert commands.call(*argv, "--overwrite") == 0


def test_failed_row_is_added_to_the_table_after_it_is_corrected(
    worker: WorkerProcess, commands: Commands, model: str
) -> None:
    (commands.folder / "in.csv").write_text("id,title,output\n1,Fox,a\n2,,b\n3,Bee,c\n")
    argv = ("run", "in.csv", "-o", "out.csv", "-m", model, "--column", "title", *GREEDY, "2")
    assert commands.call(*argv) == 1
    assert [(each["id"], each["columns"]["output"]) for each in commands.errors()] == [("2", "b")]

    def rows() -> list[dict[str, str]]:
        with (commands.folder / "out.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    assert [(row["id"], row["output"]) for row in rows()] == [("1", "a"), ("3", "c")]
    assert all(row["cellama_output"] for row in rows())
    (commands.folder / "in.csv").write_text("id,title,output\n1,Fox,a\n2,Cat,b\n3,Bee,c\n")
    assert commands.call(*argv) == 0, commands.log()
    assert [row["id"] for row in rows()] == ["1", "2", "3"]
    assert sorted(path.name for path in commands.folder.iterdir()) == ["command.log", "in.csv", "out.csv"]


def test_repeated_run_processes_the_rows_beyond_the_previous_limit(
    worker: WorkerProcess, commands: Commands, model: str
) -> None:
    write_table(commands.folder / "in.parquet", 8)
    argv = ("run", "in.parquet", "-o", "out.parquet", "-m", model, "--column", "title", "--json", *GREEDY, "2")
    assert commands.call(*argv, "--limit", "3") == 0, commands.log()
    assert parquet.read_table(commands.folder / "out.parquet").num_rows == 3
    assert commands.call(*argv) == 0, commands.log()
    assert commands.end()["completion_tokens"] == 2 * 8
    assert parquet.read_table(commands.folder / "out.parquet")["key"].to_pylist() == list(range(8))


def test_sample_option_draws_the_same_rows_each_time(worker: WorkerProcess, commands: Commands, model: str) -> None:
    (commands.folder / "in.txt").write_text("".join(f"The fox {i}\n" for i in range(50)))
    found = []
    for name in ("one.jsonl", "two.jsonl"):
        argv = ("run", "in.txt", "-o", name, "-m", model, *GREEDY, "1")
        assert commands.call(*argv, "--sample", "5") == 0, commands.log()
        found.append({json.loads(line)["id"] for line in (commands.folder / name).read_text().splitlines()})
    assert found[0] == found[1]
    assert len(found[0]) == 5
    assert commands.call(*argv, "--limit", "2") == 2
    assert "'two.jsonl' contains results of rows that --limit or --sample excludes" in commands.words()


def test_compressed_files_and_urls_are_read_and_written(worker: WorkerProcess, commands: Commands, model: str) -> None:
    text = "id,title\n1,Fox\n2,Bee\n"
    (commands.folder / "in.csv.gz").write_bytes(gzip.compress(text.encode()))
    (commands.folder / "in.csv.zst").write_bytes(pyarrow.compress(text.encode(), "zstd", asbytes=True))
    url = f"file://{commands.folder}/in.csv.gz"
    for number, source in enumerate(("in.csv.gz", "in.csv.zst", url)):
        target = f"out{number}.csv.{'zst' if number == 1 else 'gz'}"
        assert commands.call("run", source, "-o", target, "-m", model, *GREEDY, "2") == 0, commands.log()
        with pyarrow.input_stream(str(commands.folder / target)) as stream:
            rows = list(csv.DictReader(stream.read().decode().splitlines()))
        assert [(row["id"], row["title"], row["completion_tokens"]) for row in rows] == [
            ("1", "Fox", "2"),
            ("2", "Bee", "2"),
        ]
    assert commands.call("run", "in.csv.gz", "-o", "out.jsonl.gz", "-m", model, *GREEDY, "2") == 0, commands.log()
    with gzip.open(commands.folder / "out.jsonl.gz", "rt") as file:
        assert [json.loads(line)["id"] for line in file] == ["1", "2"]


def test_dry_run_estimates_without_writing_or_running_anything(
    worker: WorkerProcess, commands: Commands, model: str
) -> None:
    write_table(commands.folder / "in.parquet", 60)
    before = worker.engine_now()["requests_finished"]
    argv = ("run", "in.parquet", "-o", "out.parquet", "-m", model, "--template", "Sum up: {title}", *GREEDY, "8")
    assert commands.call(*argv, "--as", "chat", "--dry-run") == 0, commands.log()
    words = commands.words()
    assert "60 to run" in words
    assert "in prompts (measured on a sample), at most 480 generated" in words
    assert "user: Sum up: A little fox 0" in words
    assert commands.call(*argv, "--dry-run", "--json") == 0
    facts = json.loads(commands.log().splitlines()[-1])
    assert (facts["num_rows"], facts["num_invalid"], facts["is_measured"]) == (60, 0, True)
    assert 60 * 5 < facts["prompt_tokens"] < 60 * 20
    assert worker.engine_now()["requests_finished"] == before
    assert sorted(path.name for path in commands.folder.iterdir()) == ["command.log", "in.parquet"]

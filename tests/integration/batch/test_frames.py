"""`Client.batch` with rows in memory returns them with their results, in an object of the same kind."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow
import pytest

from cellama.api import AsyncClient, Client
from cellama.tasks.contract.errors import InvalidJob

from ...conftest import WorkerProcess
from .conftest import Commands

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 2}
TITLES = ["The fox", "The bee", "The cat"]


def test_pandas_data_frame_keeps_its_index_and_types(worker: WorkerProcess, model: str) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"title": TITLES, "score": [0.5, 1.0, 2.0]}, index=pandas.Index([5, 3, 9], name="nr"))
    with Client() as client:
        found = client.batch(frame, model=model, as_kind="chat", template="{title}?", **GREEDY)
    assert list(found.columns) == [
        "id", "title", "score", "output", "finish_reason", "prompt_tokens", "completion_tokens"
    ]  # fmt: skip
    assert list(found.index) == [5, 3, 9]
    assert found["score"].dtype == "float64"
    assert found["output"].map(len).all()
    joined = frame.join(found["output"])
    assert joined["output"].notna().all()


def test_polars_data_frame_is_converted_to_embeddings(worker: WorkerProcess, model: str) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"id": [1, 2, 3], "title": TITLES})
    with Client() as client:
        found = client.batch(frame, model=model, as_kind="embed", column="title")
    assert isinstance(found, polars.DataFrame)
    assert found.columns == ["id", "title", "embedding", "prompt_tokens"]
    assert found["id"].to_list() == [1, 2, 3]
    assert found.schema["embedding"] == polars.Array(polars.Float32, 192)


def test_table_with_an_output_is_resumed_without_recomputation(
    worker: WorkerProcess, commands: Commands, model: str
) -> None:
    table = pyarrow.table({"id": [1, 2, 3], "title": TITLES})
    path = commands.folder / "out.parquet"
    with Client() as client:
        first = client.batch(table, path, model=model, column="title", limit=2, **GREEDY)
        assert first["id"].to_pylist() == [1, 2]
        whole = client.batch(table, path, model=model, column="title", **GREEDY)
        assert whole["output"].to_pylist()[:2] == first["output"].to_pylist()
        assert [each.name for each in commands.folder.iterdir()] == ["out.parquet"]
        written = path.stat().st_mtime_ns
        assert client.batch(table, path, model=model, column="title", **GREEDY) == whole
        assert path.stat().st_mtime_ns == written


def test_batch_returns_dictionaries_when_rows_are_dictionaries_or_strings(worker: WorkerProcess, model: str) -> None:
    async def texts() -> list[dict[str, Any]]:
        async with AsyncClient() as client:
            return await client.batch(iter(TITLES), model=model, as_kind="prompt", **GREEDY)

    found = asyncio.run(texts())
    assert [row["text"] for row in found] == TITLES
    with Client() as client:
        rows = client.batch([{"key": 7, "title": "The fox"}], model=model, id_column="key", column="title", **GREEDY)
        jobs = client.batch([{"id": 1, "prompt": "The fox"}, {"id": 2, "text": "a fox"}], model=model, **GREEDY)
    assert rows == [
        {"key": 7, "title": "The fox", "output": found[0]["output"], "finish_reason": "length",
         "prompt_tokens": found[0]["prompt_tokens"], "completion_tokens": 2}
    ]  # fmt: skip
    assert [(row["output"] is None, row["embedding"] is None) for row in jobs] == [(False, True), (True, False)]


def test_failed_rows_are_omitted_from_the_result_and_cause_a_warning(worker: WorkerProcess, model: str) -> None:
    rows = [{"id": 1, "title": "The fox"}, {"id": 2, "title": ""}]
    with Client() as client, pytest.warns(UserWarning, match="1 of 2 rows failed and are not in the result: prompt is"):
        found = client.batch(rows, model=model, column="title", **GREEDY)
    assert [row["id"] for row in found] == [1]


@pytest.mark.parametrize(
    ("data", "output", "message"),
    [
        ("in.jsonl", None, "output is missing; specify an output file"),
        ([{"id": 1}], "out.csv", "output: 'out.csv' can't store all types in the result"),
        ([1], None, "input: row 0 is of type int; it must be a dictionary or a string"),
        ({"a": 1}, None, "input: dict is not supported; pass a path, a table, or a list of rows"),
        (pyarrow.array([1]), None, "input: a pyarrow Int64Array is not a table"),
    ],
)
def test_client_rejects_data_that_does_not_consist_of_rows(
    worker: WorkerProcess, data: Any, output: Any, message: str
) -> None:
    with Client() as client, pytest.raises(InvalidJob, match=message):
        client.batch(data, output)

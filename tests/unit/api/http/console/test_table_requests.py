"""Rows of uploaded tables and texts become the requests of a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cellama.api.http.console.table_requests import MAX_TABLE_BYTES, TableRun, is_table, write_requests
from cellama.api.http.errors import ApiError

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def requests_of(tmp_path: Path, name: str, content: bytes, **fields: str) -> list[dict[str, Any]]:
    table, target = tmp_path / "file", tmp_path / "requests.jsonl"
    table.write_bytes(content)
    target.unlink(missing_ok=True)
    write_requests(table, name, TableRun.of({"model": "tiny", **fields}), target, 1000)
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_rows_of_a_table_fill_the_template(tmp_path: Path) -> None:
    table = 'id,title,review\nr1,Tea,"Small,\nquiet"\nr2,Bœuf,{ok}\n'.encode()
    fields = {"template": "{title}: {review}", "system": "Be brief", "max_tokens": "5", "temperature": "0"}
    first, second = requests_of(tmp_path, "reviews.csv", table, **fields)
    assert (first["custom_id"], first["method"], first["url"]) == ("r1", "POST", CHAT)
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Tea: Small,\nquiet"}]
    assert first["body"] == {"model": "tiny", "messages": messages, "max_tokens": 5, "temperature": 0.0}
    assert second["body"]["messages"][1]["content"] == "Bœuf: {ok}"


def test_text_lines_and_single_columns_do_not_need_a_template(tmp_path: Path) -> None:
    lines = requests_of(tmp_path, "a.TXT", b"one\n\ntwo\r\n", endpoint=COMPLETIONS, max_tokens="3")
    assert [line["custom_id"] for line in lines] == ["1", "3"]
    assert lines[1]["body"] == {"model": "tiny", "prompt": "two", "max_tokens": 3}
    [line] = requests_of(tmp_path, "a.tsv", b"custom_id\ttext\n7\tHi\n", endpoint=EMBEDDINGS, max_tokens="3")
    assert (line["custom_id"], line["body"]) == ("7", {"model": "tiny", "input": "Hi"})


@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        (b"a,b\n1,2\n", {}, "template is empty; write the request text, using the file's columns: {a}, {b}"),
        (b"a,b\n1,2\n", {"template": "{c}"}, "template: the file has no column 'c'; its columns are: a, b"),
        (b"a,b\n1,2\n", {"template": "{a"}, "template: "),
        (b"a\n\xff\n", {}, "UTF-8"),
        (b"a\n", {}, "the table has no rows"),
        (b"a\n1\n", {"model": " "}, "choose a model"),
        (b"a\n1\n", {"max_tokens": "many"}, "max_tokens is 'many'"),
        (b"a\n1\n", {"endpoint": "/v1/images"}, "endpoint is '/v1/images'"),
    ],
)
def test_unusable_tables_are_rejected_with_a_remedy(
    tmp_path: Path, content: bytes, fields: dict[str, str], message: str
) -> None:
    with pytest.raises(ApiError) as refused:
        requests_of(tmp_path, "a.csv", content, **fields)
    assert refused.value.status == 400
    assert message in refused.value.message


def test_oversized_tables_are_rejected(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(MAX_TABLE_BYTES + 1)
    with pytest.raises(ApiError, match="use `cellama batch run`") as refused:
        write_requests(tmp_path / "file", "a.csv", TableRun.of({"model": "tiny"}), tmp_path / "x", 1000)
    assert refused.value.status == 413


def test_only_tables_and_text_files_are_converted() -> None:
    assert [name for name in ("a.csv", "a.jsonl", "b.TSV", "c.txt", "d.parquet", "e.csv.gz", "") if is_table(name)] == [
        "a.csv",
        "b.TSV",
        "c.txt",
    ]

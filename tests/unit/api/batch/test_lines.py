"""Test reading the input of a bulk run: each line becomes a job, or an error with its number and a remedy."""

from __future__ import annotations

import io
import json
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, parquet

from cellama.api.batch.formats import Format, format_of
from cellama.api.batch.lines import BadLine, BatchLine, Defaults, RowMapping, read_lines
from cellama.api.batch.output import bad_line, error_line, result_line
from cellama.api.batch.templates import RowTemplate
from cellama.api.batch.work import WorkFile
from cellama.api.openai.answers import body_of, response_of
from cellama.api.openai.bodies import params_of_body
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.shapes.results import usage_of

NO_COLUMNS = RowMapping()
DEFAULTS = Defaults("m", {"max_tokens": 7})
EXPECTED = {"type": "content", "content": "Hello"}
HELLO = [{"role": "user", "content": "Hi"}]


def read(*lines: Any, format_: Format = "jsonl", columns: RowMapping = NO_COLUMNS, limit: int = 10_000) -> list[Any]:
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return list(read_lines(io.BytesIO(b"\n".join(texts) + b"\n"), format_, DEFAULTS, limit, columns))


def test_short_lines_get_default_ids_models_and_parameters() -> None:
    generate, chat, embed = read(
        {"prompt": "a"}, {"id": "x", "messages": HELLO, "max_tokens": 3}, {"text": "t", "model": "n"}
    )
    assert (generate.id, generate.kind, generate.model, generate.params) == (
        "line-1", "generate", "m", {"prompt": "a", "max_tokens": 7},
    )  # fmt: skip
    assert (chat.id, chat.kind, chat.params["max_tokens"]) == ("x", "chat", 3)
    assert (embed.kind, embed.model, embed.params) == ("embed", "n", {"texts": "t"})


def test_openai_lines_are_converted_to_jobs() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    body = {"model": "n", "messages": HELLO, "max_completion_tokens": 5, "response_format": schema, "user": "u",
            "logprobs": True, "top_logprobs": 2, "seed": None, "prediction": EXPECTED}  # fmt: skip
    (line,) = read({"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body})
    assert (line.id, line.form, line.kind, line.model) == ("c", "openai", "chat", "n")
    assert line.params.pop("prediction") == EXPECTED
    assert line.params == {"messages": HELLO, "max_tokens": 5, "json_schema": {"type": "object"},
                           "strict_schema": False, "logprobs": 2}  # fmt: skip
    assert params_of_body("/v1/embeddings", {"input": "a", "encoding_format": "float"}) == {
        "texts": "a",
        "encoding": "list",
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", "the line is not valid JSON"),
        ({"custom_id": 7, "url": "/v1/completions", "body": {"prompt": "a"}}, "custom_id is 7; it must be a string"),
        (b'"text"', "the line is of type str; it must be a JSON object"),
        (
            {"max_tokens": 3},
            "one of prompt, messages, text, texts, documents; this line has none of them",
        ),
        ({"prompt": "a", "text": "b"}, "this line has prompt and text"),
        ({"custom_id": "a", "url": "/v1/responses", "body": {"input": "a", "background": True}}, "background is True"),
        ({"custom_id": "a", "url": "/v1/responses", "body": {}}, "input is missing"),
        ({"custom_id": "a", "url": "/v1/rerank", "body": {"query": "a", "documents": "b"}}, "documents is str"),
        ({"custom_id": "a", "url": "/v1/foo", "body": {}}, "/v1/embeddings, /v1/responses, /v1/rerank"),
        ({"prompt": "a", "temperture": 1}, "unknown parameter 'temperture'; did you mean 'temperature'"),
        ({"prompt": ""}, "prompt is '': the text is empty"),
        ({"prompt": "a", "id": ""}, "id is ''"),
        ({"prompt": "a", "stream": True}, "priority and stream are not supported in bulk runs"),
        ({"prompt": "x" * 20_000}, "bytes, and the limit is 10000; split the line"),
        ({"url": "/v1/completions", "body": {"prompt": "a"}}, "custom_id is missing"),
        (
            {"custom_id": "c", "url": "/v1/images", "body": {}},
            "url is '/v1/images'; it must be one of /v1/chat/completions",
        ),
        ({"custom_id": "c", "url": "/v1/completions", "body": {}}, "prompt is missing"),
        ({"custom_id": "c", "url": "/v1/completions", "method": "GET", "body": {"prompt": "a"}}, "method is 'GET'"),
        ({"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "a", "stream": True}}, "body.stream is true"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_invalid_line_is_reported_with_its_number_and_reading_continues(line: Any, message: str) -> None:
    bad, good = read(line, {"prompt": "fine"})
    assert isinstance(bad, BadLine)
    assert bad.number == 1
    assert message in bad.message
    assert isinstance(good, BatchLine)
    assert good.number == 2


def test_line_without_a_model_is_invalid_when_the_run_has_no_default() -> None:
    (bad,) = read_lines(io.BytesIO(b'{"prompt": "a"}\n'), "jsonl", Defaults(None, {}), 1000)
    assert isinstance(bad, BadLine)
    assert "model is missing" in bad.message


def test_line_in_a_different_encoding_does_not_affect_other_lines() -> None:
    texts = {"utf-16-le": '{"prompt": "e"}', "latin-1": '{"prompt": "é"}', "utf-8-sig": '{"prompt": "é"}'}
    utf16, latin, marked = read(*(text.encode(encoding) for encoding, text in texts.items()))
    assert isinstance(utf16, BadLine)
    assert isinstance(latin, BadLine)
    assert "the line is not valid JSON" in utf16.message
    assert latin.message == "the line is not valid UTF-8 at byte 12; convert the file to UTF-8"
    assert isinstance(marked, BatchLine)
    (text,) = read("\ufeffé".encode(), format_="text")
    assert text.params["prompt"] == "é"


@pytest.mark.parametrize("line_id", [7, 0, -1, 2**64 - 1, "7", "é"])
def test_id_keeps_its_type(line_id: Any) -> None:
    (line,) = read({"id": line_id, "prompt": "x"})
    assert (type(line.id), line.id) == (type(line_id), line_id)


@pytest.mark.parametrize("line_id", ["", 1.5, True, None, ["a"], "half a pair: \ud800"])
def test_line_with_an_invalid_id_is_rejected(line_id: Any) -> None:
    body = {"url": "/v1/completions", "body": {"prompt": "x"}}
    for found in read({"id": line_id, "prompt": "x"}, {"custom_id": line_id, **body}):
        assert isinstance(found, BadLine)
        found.message.encode()
        assert "must be a string" in found.message or "missing" in found.message


def test_parquet_file_yields_a_prompt_per_row(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    table = {"id": [7, 8, 9], "question": ["a", None, "c"], "at": [date(2026, 1, 2)] * 3}
    parquet.write_table(pyarrow.table(table), path)

    def rows(column: str | None) -> list[Any]:
        return list(read_lines(path, "parquet", DEFAULTS, 10_000, RowMapping(column)))

    found = rows("question")
    assert [(row.id, row.params["prompt"]) for row in found if isinstance(row, BatchLine)] == [(7, "a"), (9, "c")]
    assert [(row.number, row.id) for row in found if isinstance(row, BadLine)] == [(2, 8)]
    assert [row.columns for row in found] == [{"at": "2026-01-02"}] * 3
    with pytest.raises(
        InvalidJob, match="--column: name the column of the prompts, or use --template; columns: id, question, at"
    ):
        rows(None)


def test_read_lines_raises_when_the_file_has_a_different_format(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no parquet")
    for format_, kind in (("parquet", "Parquet"), ("arrow", "Arrow")):
        with pytest.raises(InvalidJob, match=f"can't read the {kind} file .* after row 0"):
            list(read_lines(tmp_path / "x", format_, DEFAULTS, 10_000))  # type: ignore[arg-type]
    with pytest.raises(InvalidJob, match="can't read the CSV file after row"):
        read(b"question", b"a", *[b"x" * 5000] * 3, b"\xff", format_="csv")


def test_text_and_csv_files_yield_a_prompt_per_line() -> None:
    texts = read(b"one", b"", b"two", format_="text")
    assert [(line.number, line.params["prompt"]) for line in texts] == [(1, "one"), (3, "two")]
    rows = read(b"id,question", b'1,"a ""b"""', b"2,c", format_="csv")
    assert [(line.id, line.params["prompt"]) for line in rows] == [("1", 'a "b"'), ("2", "c")]
    with pytest.raises(InvalidJob, match="--column: name the column of the prompts, or use --template; columns: topic"):
        read(b"topic,question", b"1,a", format_="csv")


@pytest.mark.parametrize(
    ("header", "columns", "ids"),
    [
        ("id,question,topic", RowMapping("question"), ["q7", "q8"]),
        ("ID,question,topic", RowMapping("question"), ["q7", "q8"]),
        ("key,question,topic", RowMapping("question", "key"), ["q7", "q8"]),
        ("key,question,topic", RowMapping("question"), ["1", "2"]),
    ],
)
def test_csv_rows_keep_their_ids_and_other_columns(header: str, columns: RowMapping, ids: list[str]) -> None:
    rows = read(header.encode(), b"q7,Who?,self", b"q8,What?,bees", format_="csv", columns=columns)
    assert [row.id for row in rows] == ids
    assert [row.columns["topic"] for row in rows] == ["self", "bees"]
    assert all("question" not in row.columns and "id" not in row.columns for row in rows)
    without = read(header.encode(), b",Who?,self", format_="csv", columns=columns)[0]
    assert isinstance(without, BadLine) == (ids != ["1", "2"])  # ids are numbered only if the file has no ids


def test_rows_are_converted_to_chats_prompts_and_embeddings(tmp_path: Path) -> None:
    csv = (b"id,title,body", b"q7,Fox,Red {1}")
    template = RowTemplate("{{Sum up}}: {title}\n{body}")
    (chat,) = read(*csv, format_="csv", columns=RowMapping(template=template, as_kind="chat"))
    assert chat.params["messages"] == [{"role": "user", "content": "{Sum up}: Fox\nRed {1}"}]
    assert chat.columns == {"title": "Fox", "body": "Red {1}"}
    (prompt,) = read(*csv, format_="csv", columns=RowMapping("title", as_kind="prompt"))
    assert (prompt.kind, prompt.params["prompt"]) == ("generate", "Fox")
    (embed,) = read(*csv, format_="csv", columns=RowMapping("body", as_kind="embed"))
    assert (embed.kind, embed.params) == ("embed", {"texts": "Red {1}"})
    (turns,) = read({"id": 1, "dialog": HELLO, "tag": 3}, columns=RowMapping("dialog", as_kind="chat"))
    assert (turns.id, turns.params["messages"], turns.columns) == (1, HELLO, {"tag": 3})


def test_rows_become_chats_when_there_is_a_system_message() -> None:
    defaults = Defaults("m", {"system": "Be brief."})
    (line,) = read_lines(io.BytesIO(b"Hi\n"), "text", defaults, 1000)
    assert isinstance(line, BatchLine)
    assert (line.kind, line.params["system"]) == ("chat", "Be brief.")
    with pytest.raises(InvalidJob, match="system: only chats can have a system message, but --as is embed; use"):
        list(read_lines(io.BytesIO(b"Hi\n"), "text", defaults, 1000, RowMapping(as_kind="embed")))


def test_json_row_is_invalid_when_it_lacks_a_column_of_the_first_row() -> None:
    columns = RowMapping(template=RowTemplate("{title}"))
    good, bad = read({"title": "a"}, {"name": "b"}, columns=columns)
    assert (good.id, bad.id) == ("line-1", "line-2")
    assert bad.message == "the row has no column 'title'; add it, or leave the row out"


def test_directory_input_yields_a_row_per_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, data in {
        "b.txt": b"two",
        "sub/a.md": b"three",
        ".hidden": b"x",
        "a.txt": "é".encode(),
        "z": b"\xff",
    }.items():
        (tmp_path / name).write_bytes(data)
    found = list(read_lines(tmp_path, "directory", DEFAULTS, 10_000))
    lines = [line for line in found if isinstance(line, BatchLine)]
    assert [(line.id, line.params["prompt"]) for line in lines] == [
        ("a.txt", "é"),
        ("b.txt", "two"),
        ("sub/a.md", "three"),
    ]
    assert [line.message for line in found if isinstance(line, BadLine)] == [
        "z: the text is not valid UTF-8 at byte 0; convert the file to UTF-8"
    ]


def test_only_chosen_rows_are_read() -> None:
    lines = read_lines(io.BytesIO(b"a\n\nb\nc\n"), "text", DEFAULTS, 1000, chosen={0, 2})
    assert [line.number for line in lines] == [1, 4]


def test_arrow_file_and_stream_have_the_same_rows(tmp_path: Path) -> None:
    table = pyarrow.table({"id": [7, 8], "text": ["a", "b"]})
    feather.write_feather(table, tmp_path / "file")
    with pyarrow.ipc.new_stream(tmp_path / "stream", table.schema) as stream:
        stream.write_table(table)
    for name in ("file", "stream"):
        lines = [line for line in read_lines(tmp_path / name, "arrow", DEFAULTS, 1000) if isinstance(line, BatchLine)]
        assert [(line.id, line.params["prompt"]) for line in lines] == [(7, "a"), (8, "b")]


@pytest.mark.parametrize("params", [{"n": 2}, {"texts": ["a", "b"]}])
def test_line_with_several_results_is_invalid_for_table_output(params: dict[str, Any]) -> None:
    line = {"prompt": "a", **params} if "n" in params else params
    (bad,) = read(line, columns=RowMapping(keeps_all=True))
    assert isinstance(bad, BadLine)
    assert "a row of a table has only one result; write results to a .jsonl file" in bad.message


def test_read_lines_rejects_unknown_columns() -> None:
    with pytest.raises(InvalidJob, match="--id-column: unknown column 'nr'; columns: id, question"):
        read(b"id,question", b"1,a", format_="csv", columns=RowMapping("question", "nr"))
    with pytest.raises(InvalidJob, match="--id-column: JSON lines have their id in `id`"):
        read({"prompt": "a"}, columns=RowMapping(id="prompt"))
    with pytest.raises(InvalidJob, match="--template: unknown column 'body'; columns: id, question"):
        read(b"id,question", b"1,a", format_="csv", columns=RowMapping(template=RowTemplate("{body}")))
    with pytest.raises(InvalidJob, match="several columns are named 'id'; rename all but one"):
        read(b"id,question,id", b"1,a,2", format_="csv", columns=RowMapping("question"))


@pytest.mark.parametrize("columns", [NO_COLUMNS, RowMapping("question")])
@pytest.mark.parametrize("mark", [";", "\t"])
def test_csv_with_another_separator_is_rejected_with_a_hint(columns: RowMapping, mark: str) -> None:
    with pytest.raises(InvalidJob, match=r"the file seems to use the separator '.*', but must use commas"):
        read(f"id{mark}question".encode(), f"1{mark}a".encode(), format_="csv", columns=columns)
    (row,) = read(f"id{mark}question".encode(), b"a", format_="csv", columns=RowMapping(f"id{mark}question"))
    assert row.params["prompt"] == "a"


def test_default_ids_differ_from_given_ids() -> None:
    lines = read({"prompt": "a"}, {"prompt": "b", "id": 1}, {"prompt": "c", "id": "1"})
    assert [line.id for line in lines] == ["line-1", 1, "1"]


def test_additional_columns_are_copied_into_results_and_errors(tmp_path: Path) -> None:
    (row,) = read(b"id,question,topic", b"q7,Who?,self", format_="csv", columns=RowMapping("question"))
    with closing(WorkFile(tmp_path / "x.work")) as work:
        with work.reading():
            work.add(row)
        (line,) = work.next_lines("m", 9)
    result = {"text": "I", "finish_reason": "stop", "model": "m", "usage": {}}
    assert result_line(line, result)["columns"] == {"topic": "self"}
    assert error_line(line, {"code": "dead", "message": "x"})["columns"] == {"topic": "self"}
    (bad,) = read(b"id,question,topic", b"q7,,self", format_="csv", columns=RowMapping("question"))
    assert bad_line("auto", bad) == {
        "id": "q7", "line": 1, "columns": {"topic": "self"},
        "error": {"code": "invalid_request", "message": bad.message},
    }  # fmt: skip


def test_line_hash_depends_on_the_job_and_sort_key_starts_with_the_prompt() -> None:
    one, same, other = read({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}, {"id": "a", "prompt": "y"})
    assert one.hash == same.hash != other.hash
    chats = read({"messages": [*HELLO, {"role": "assistant", "content": "A"}]}, {"messages": HELLO})
    assert chats[0].key.startswith(chats[1].key)
    tokens = read({"prompt": [5, 6, 7]}, {"prompt": [5, 6]})
    assert tokens[0].key.startswith(tokens[1].key)


def test_format_is_derived_from_the_file_name() -> None:
    names = ("a.jsonl", "a.txt", "a.csv.gz", "a.TSV", "a.parquet", "a.feather", "a", "a.jsonl.zst")
    assert [format_of(Path(name), "auto") for name in names] == [
        "jsonl", "text", "csv", "tsv", "parquet", "arrow", "jsonl", "jsonl",
    ]  # fmt: skip
    assert format_of("https://host/a.csv.gz?version=2", "auto") == "csv"
    assert format_of(Path("a.txt"), "jsonl") == "jsonl"


def test_result_line_in_the_openai_format_has_choices_and_usage() -> None:
    usage = {**usage_of(prompt_tokens=3, completion_tokens=2), "cached_tokens": 1, "accepted_prediction_tokens": 1}
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"text": "", "message": message, "finish_reason": "stop", "usage": usage, "model": "m"}
    response = response_of("c", "line_1", body_of("chat", "line_1", [result]))
    body = response["response"]["body"]
    assert (response["custom_id"], response["error"], body["object"]) == ("c", None, "chat.completion")
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["choices"][0]["message"] == {**message, "content": None, "refusal": None}
    assert body["usage"]["total_tokens"] == 5


@pytest.mark.parametrize("format_", ["jsonl", "text", "csv"])
def test_line_whose_job_is_too_large_is_invalid_in_every_format(format_: Format) -> None:
    prompts = ["short", '"' * 2000, "é" * 2900]  # a quote and an é take two bytes each in a message
    text = {"jsonl": "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)}
    text["text"] = "".join(prompt + "\n" for prompt in prompts)
    quoted = ('"' + prompt.replace('"', '""') + '"\n' for prompt in prompts)
    text["csv"] = "prompt\n" + "".join(quoted)

    def kinds(limit: int) -> list[type]:
        stream = io.BytesIO(text[format_].encode())
        return [type(line) for line in read_lines(stream, format_, DEFAULTS, limit)]

    assert kinds(4090) == [BatchLine, BadLine, BadLine]
    assert kinds(6000) == [BatchLine, BatchLine, BatchLine]


def test_line_size_includes_the_parameters_of_the_run() -> None:
    defaults = Defaults("m", {"grammar": "x" * 3000})
    (bad,) = read_lines(io.BytesIO(b'{"prompt": "a"}\n'), "jsonl", defaults, 3000)
    assert isinstance(bad, BadLine)
    assert "the limit is 3000; split the line, or raise max_payload_bytes" in bad.message


def test_file_may_be_closed_before_all_rows_are_read() -> None:
    stream = io.BytesIO(b"question\nWho?\nWhy?\n")
    lines = read_lines(stream, "csv", DEFAULTS, 10_000)
    next(lines)
    stream.close()
    del lines  # pytest turns an exception in the generators' cleanup into a failure

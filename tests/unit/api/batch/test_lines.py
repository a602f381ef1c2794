"""What a bulk run reads: every line is understood, or refused with its number and a remedy."""

from __future__ import annotations

import io
import json
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from cellama.api.batch.lines import BadLine, BatchLine, Columns, Defaults, Format, format_of, read_lines
from cellama.api.batch.output import bad_line, error_line, result_line
from cellama.api.batch.work import WorkFile
from cellama.api.openai.answers import response_of
from cellama.api.openai.bodies import params_of_body
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.shapes.results import usage_of

NO_COLUMNS = Columns()
DEFAULTS = Defaults("m", {"max_tokens": 7})
EXPECTED = {"type": "content", "content": "Hello"}
HELLO = [{"role": "user", "content": "Hi"}]


def read(*lines: Any, format_: Format = "jsonl", columns: Columns = NO_COLUMNS, limit: int = 10_000) -> list[Any]:
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return list(read_lines(io.BytesIO(b"\n".join(texts) + b"\n"), format_, DEFAULTS, limit, columns))


def test_short_lines_get_ids_models_and_parameters() -> None:
    generate, chat, embed = read(
        {"prompt": "a"}, {"id": "x", "messages": HELLO, "max_tokens": 3}, {"text": "t", "model": "n"}
    )
    assert (generate.id, generate.kind, generate.model, generate.params) == (
        "line-1", "generate", "m", {"prompt": "a", "max_tokens": 7},
    )  # fmt: skip
    assert (chat.id, chat.kind, chat.params["max_tokens"]) == ("x", "chat", 3)
    assert (embed.kind, embed.model, embed.params) == ("embed", "n", {"texts": "t"})


def test_openai_lines_become_the_same_jobs() -> None:
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
        (b"{broken", "it is not valid JSON"),
        ({"custom_id": 7, "url": "/v1/completions", "body": {"prompt": "a"}}, "custom_id is 7; it must be a text"),
        (b'"text"', "it is str, not an object"),
        ({"max_tokens": 3}, "a line has one of prompt, messages, text, texts; this one has none of them"),
        ({"prompt": "a", "text": "b"}, "this one has prompt and text"),
        ({"prompt": "a", "temperture": 1}, "unknown parameter 'temperture'; did you mean 'temperature'"),
        ({"prompt": ""}, "prompt is '': it is empty"),
        ({"prompt": "a", "id": ""}, "its id is ''"),
        ({"prompt": "a", "stream": True}, "priority and stream mean nothing in a bulk run"),
        ({"prompt": "x" * 20_000}, "bytes, and the limit is 10000; split it"),
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
def test_bad_line_is_refused_with_its_number_and_the_next_one_is_read(line: Any, message: str) -> None:
    bad, good = read(line, {"prompt": "fine"})
    assert isinstance(bad, BadLine)
    assert bad.number == 1
    assert message in bad.message
    assert isinstance(good, BatchLine)
    assert good.number == 2


def test_line_without_a_model_is_refused_if_the_run_has_none() -> None:
    (bad,) = read_lines(io.BytesIO(b'{"prompt": "a"}\n'), "jsonl", Defaults(None, {}), 1000)
    assert isinstance(bad, BadLine)
    assert "it names no model" in bad.message


def test_line_in_another_encoding_is_refused_by_itself() -> None:
    texts = {"utf-16-le": '{"prompt": "e"}', "latin-1": '{"prompt": "é"}', "utf-8-sig": '{"prompt": "é"}'}
    utf16, latin, marked = read(*(text.encode(encoding) for encoding, text in texts.items()))
    assert isinstance(utf16, BadLine)
    assert isinstance(latin, BadLine)
    assert "it is not valid JSON" in utf16.message
    assert latin.message == "it is not valid UTF-8 at byte 12; convert the file"
    assert isinstance(marked, BatchLine)
    (text,) = read("\ufeffé".encode(), format_="text")
    assert text.params["prompt"] == "é"


@pytest.mark.parametrize("line_id", [7, 0, -1, 2**64 - 1, "7", "é"])
def test_id_keeps_its_type(line_id: Any) -> None:
    (line,) = read({"id": line_id, "prompt": "x"})
    assert (type(line.id), line.id) == (type(line_id), line_id)


@pytest.mark.parametrize("line_id", ["", 1.5, True, None, ["a"], "half a pair: \ud800"])
def test_id_that_is_no_text_is_refused(line_id: Any) -> None:
    body = {"url": "/v1/completions", "body": {"prompt": "x"}}
    for found in read({"id": line_id, "prompt": "x"}, {"custom_id": line_id, **body}):
        assert isinstance(found, BadLine)
        found.message.encode()
        assert "text" in found.message or "missing" in found.message


def test_parquet_has_a_prompt_per_row(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    table = {"id": [7, 8, 9], "question": ["a", None, "c"], "at": [date(2026, 1, 2)] * 3}
    parquet.write_table(pyarrow.table(table), path)

    def rows(column: str | None) -> list[Any]:
        with path.open("rb") as file:
            return list(read_lines(file, "parquet", DEFAULTS, 10_000, Columns(column)))

    found = rows("question")
    assert [(row.id, row.params["prompt"]) for row in found if isinstance(row, BatchLine)] == [(7, "a"), (9, "c")]
    assert [(row.number, row.id) for row in found if isinstance(row, BadLine)] == [(2, 8)]
    assert [row.columns for row in found] == [{"at": "2026-01-02"}] * 3
    with pytest.raises(InvalidJob, match="no --column is given; the file has: id, question, at"):
        rows(None)


def test_files_that_are_not_what_they_say_are_refused() -> None:
    with pytest.raises(InvalidJob, match="Parquet file can't be read after row 0"):
        read(b"no parquet", format_="parquet")
    with pytest.raises(InvalidJob, match="CSV can't be read after row"):
        read(b"question", b"a", *[b"x" * 5000] * 3, b"\xff", format_="csv")


def test_text_and_csv_have_a_prompt_per_line() -> None:
    texts = read(b"one", b"", b"two", format_="text")
    assert [(line.number, line.params["prompt"]) for line in texts] == [(1, "one"), (3, "two")]
    rows = read(b"id,question", b'1,"a ""b"""', b"2,c", format_="csv")
    assert [(line.id, line.params["prompt"]) for line in rows] == [("1", 'a "b"'), ("2", "c")]
    with pytest.raises(InvalidJob, match="no --column is given; the file has: topic, question"):
        read(b"topic,question", b"1,a", format_="csv")


@pytest.mark.parametrize(
    ("header", "columns", "ids"),
    [
        ("id,question,topic", Columns("question"), ["q7", "q8"]),
        ("ID,question,topic", Columns("question"), ["q7", "q8"]),
        ("key,question,topic", Columns("question", "key"), ["q7", "q8"]),
        ("key,question,topic", Columns("question"), ["1", "2"]),
    ],
)
def test_rows_keep_their_ids_and_what_else_they_have(header: str, columns: Columns, ids: list[str]) -> None:
    rows = read(header.encode(), b"q7,Who?,self", b"q8,What?,bees", format_="csv", columns=columns)
    assert [row.id for row in rows] == ids
    assert [row.columns["topic"] for row in rows] == ["self", "bees"]
    assert all("question" not in row.columns and "id" not in row.columns for row in rows)
    without = read(header.encode(), b",Who?,self", format_="csv", columns=columns)[0]
    assert isinstance(without, BadLine) == (ids != ["1", "2"])  # none is invented where rows have some


def test_columns_are_refused_where_there_are_none_of_that_name() -> None:
    with pytest.raises(InvalidJob, match="there is no column 'nr' for --id-column; the file has: id, question"):
        read(b"id,question", b"1,a", format_="csv", columns=Columns("question", "nr"))
    with pytest.raises(InvalidJob, match="--column and --id-column are for CSV and Parquet; jsonl has no columns"):
        read({"prompt": "a"}, columns=Columns("prompt"))


@pytest.mark.parametrize("columns", [NO_COLUMNS, Columns("question")])
@pytest.mark.parametrize("mark", [";", "\t"])
def test_table_with_other_separators_than_commas_is_refused(columns: Columns, mark: str) -> None:
    with pytest.raises(InvalidJob, match=r"its columns seem to be separated by '.*', and must be by commas"):
        read(f"id{mark}question".encode(), f"1{mark}a".encode(), format_="csv", columns=columns)
    (row,) = read(f"id{mark}question".encode(), b"a", format_="csv", columns=Columns(f"id{mark}question"))
    assert row.params["prompt"] == "a"


def test_id_of_a_line_is_never_that_of_another_line_that_has_none() -> None:
    lines = read({"prompt": "a"}, {"prompt": "b", "id": 1}, {"prompt": "c", "id": "1"})
    assert [line.id for line in lines] == ["line-1", 1, "1"]


def test_columns_of_a_row_stand_beside_its_result_and_its_error(tmp_path: Path) -> None:
    (row,) = read(b"id,question,topic", b"q7,Who?,self", format_="csv", columns=Columns("question"))
    with closing(WorkFile(tmp_path / "x.work")) as work:
        with work.reading():
            work.add(row)
        (line,) = work.next_lines("m", 9)
    result = {"text": "I", "finish_reason": "stop", "model": "m", "usage": {}}
    assert result_line(line, result)["columns"] == {"topic": "self"}
    assert error_line(line, {"code": "dead", "message": "x"})["columns"] == {"topic": "self"}
    (bad,) = read(b"id,question,topic", b"q7,,self", format_="csv", columns=Columns("question"))
    assert bad_line("auto", bad) == {
        "id": "q7", "line": 1, "columns": {"topic": "self"},
        "error": {"code": "invalid_request", "message": bad.message},
    }  # fmt: skip


def test_hash_tells_changed_lines_and_keys_put_alike_ones_together() -> None:
    one, same, other = read({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}, {"id": "a", "prompt": "y"})
    assert one.hash == same.hash != other.hash
    chats = read({"messages": [*HELLO, {"role": "assistant", "content": "A"}]}, {"messages": HELLO})
    assert chats[0].key.startswith(chats[1].key)
    tokens = read({"prompt": [5, 6, 7]}, {"prompt": [5, 6]})
    assert tokens[0].key.startswith(tokens[1].key)


def test_form_of_a_file_is_known_by_its_name() -> None:
    assert [format_of(Path(name), "auto") for name in ("a.jsonl", "a.txt", "a.csv", "a.parquet", "a")] == [
        "jsonl", "text", "csv", "parquet", "jsonl",
    ]  # fmt: skip
    assert format_of(Path("a.txt"), "jsonl") == "jsonl"


def test_openai_response_has_choices_and_usage() -> None:
    usage = {**usage_of(prompt_tokens=3, completion_tokens=2), "cached_tokens": 1, "accepted_prediction_tokens": 1}
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"text": "", "message": message, "finish_reason": "stop", "usage": usage, "model": "m"}
    response = response_of("c", "line_1", "chat", result)
    body = response["response"]["body"]
    assert (response["custom_id"], response["error"], body["object"]) == ("c", None, "chat.completion")
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["choices"][0]["message"] == {**message, "content": None}
    assert body["usage"]["total_tokens"] == 5


@pytest.mark.parametrize("format_", ["jsonl", "text", "csv"])
def test_line_whose_job_is_too_large_is_a_bad_one_in_every_format(format_: Format) -> None:
    prompts = ["short", '"' * 2000, "é" * 2900]  # quotes take two bytes in a message, an é as many
    text = {"jsonl": "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)}
    text["text"] = "".join(prompt + "\n" for prompt in prompts)
    quoted = ('"' + prompt.replace('"', '""') + '"\n' for prompt in prompts)
    text["csv"] = "prompt\n" + "".join(quoted)

    def kinds(limit: int) -> list[type]:
        stream = io.BytesIO(text[format_].encode())
        return [type(line) for line in read_lines(stream, format_, DEFAULTS, limit)]

    assert kinds(4090) == [BatchLine, BadLine, BadLine]
    assert kinds(6000) == [BatchLine, BatchLine, BatchLine]


def test_parameters_of_the_run_count_to_the_size_of_a_line() -> None:
    defaults = Defaults("m", {"grammar": "x" * 3000})
    (bad,) = read_lines(io.BytesIO(b'{"prompt": "a"}\n'), "jsonl", defaults, 3000)
    assert isinstance(bad, BadLine)
    assert "the limit is 3000; split it, or raise max_payload_bytes" in bad.message

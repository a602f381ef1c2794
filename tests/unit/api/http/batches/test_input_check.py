"""Test that each error in an input file is reported with its line and fails the batch."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from cellama.api.batch.lines import Defaults, read_lines
from cellama.api.http.auth import Caller
from cellama.api.http.batches.input_check import MAX_ERRORS, InputCheck, InputRefused

CHAT = "/v1/chat/completions"
KEY = Caller("acme", models=frozenset({"tiny", "other"}), adapters=frozenset({"pirate"}))


def line(custom_id: Any = "a", **changed: Any) -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "tiny"}, **changed}
    return json.dumps(request).encode() + b"\n"


def checked(*lines: bytes, max_lines: int = 200) -> list[tuple[int, str | None]]:
    """Return the number of requests and their common model, of a valid file. Raises InputRefused."""
    ends: list[tuple[int, str | None]] = []
    check = InputCheck(CHAT, max_lines, KEY, lambda num_lines, model: ends.append((num_lines, model)))
    for _ in read_lines(io.BytesIO(b"".join(lines)), "jsonl", Defaults(None, {}), 1000, check=check.line):
        pass
    check.end()
    return ends


def errors_of(*lines: bytes, max_lines: int = 200) -> list[tuple[Any, Any, Any]]:
    with pytest.raises(InputRefused) as refused:
        checked(*lines, max_lines=max_lines)
    return [(error["code"], error["param"], error["line"]) for error in refused.value.errors]


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{\n", "invalid_json_line", None),
        (b"[1]\n", "invalid_json_line", None),
        (b"\xff\xfe{}\n", "invalid_json_line", None),
        (b"[" * 900 + b"\n", "invalid_json_line", None),
        (b"x" * 2000 + b"\n", "line_too_long", None),
        (line(None), "missing_required_parameter", "custom_id"),
        (line(7), "invalid_custom_id", "custom_id"),
        (line("\ud800"), "invalid_custom_id", "custom_id"),
        (line("first"), "duplicate_custom_id", "custom_id"),
        (line(body={"model": "tiny", "adapters": ["pirate=0.5", "poet"]}), "adapter_not_allowed", "body.adapters"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "mismatched_endpoint", "url"),
        (line(body=None), "invalid_request", "body"),
        (line(body={}), "missing_required_parameter", "body.model"),
        (line(body={"model": "\ud800"}), "missing_required_parameter", "body.model"),
        (line(body={"model": "secret"}), "model_not_allowed", "body.model"),
        (line(body={"model": "tiny", "priority": 0}), "invalid_request", "body.priority"),
        (line(body={"model": "tiny", "cache_scope": "acme"}), "invalid_request", "body.cache_scope"),
    ],
)
def test_check_reports_the_line_number_of_each_invalid_line(bad: bytes, code: str, param: str | None) -> None:
    assert errors_of(line("first"), b"\n", bad, line("last")) == [(code, param, 3)]


def test_check_reports_request_count_and_common_model_of_valid_file() -> None:
    assert checked(line("a") + b"\n" + line("b").rstrip()) == [(2, "tiny")]
    assert checked(line("a") + line("b", body={"model": "other"})) == [(2, None)]


def test_check_rejects_file_with_no_requests_or_too_many_requests() -> None:
    assert errors_of(b"\n \n") == [("empty_file", None, None)]
    assert errors_of(line("a"), line("b"), max_lines=1) == [("too_many_requests", None, None)]


def test_check_stops_after_maximum_number_of_errors() -> None:
    assert len(errors_of(*[b"{\n"] * 199)) == MAX_ERRORS

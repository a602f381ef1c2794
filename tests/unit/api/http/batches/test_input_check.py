"""What is wrong with a file is told of each line, and fails the batch."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from cellama.api.http.batches.input_check import MAX_ERRORS, Rules, check_input
from cellama.api.http.callers import Caller

CHAT = "/v1/chat/completions"
KEY = Caller("acme", models=frozenset({"tiny", "other"}), adapters=frozenset({"pirate"}))
RULES = Rules(CHAT, max_lines=200, max_line_bytes=1000, caller=KEY)


def line(custom_id: Any = "a", **changed: Any) -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "tiny"}, **changed}
    return json.dumps(request).encode() + b"\n"


def errors_of(*lines: bytes, rules: Rules = RULES) -> list[tuple[Any, Any, Any]]:
    found = check_input(io.BytesIO(b"".join(lines)), rules)
    return [(error["code"], error["param"], error["line"]) for error in found.errors]


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
def test_line_that_is_wrong_is_told_with_its_number(bad: bytes, code: str, param: str | None) -> None:
    assert errors_of(line("first"), b"\n", bad, line("last")) == [(code, param, 3)]


def test_file_that_is_right_tells_how_many_requests_it_has_and_their_one_model() -> None:
    found = check_input(io.BytesIO(line("a") + b"\n" + line("b").rstrip()), RULES)
    assert (found.num_lines, found.errors, found.model) == (2, [], "tiny")
    found = check_input(io.BytesIO(line("a") + line("b", body={"model": "other"})), RULES)
    assert found.model is None


def test_file_without_requests_or_with_too_many_fails() -> None:
    assert errors_of(b"\n \n") == [("empty_file", None, None)]
    assert errors_of(line("a"), line("b"), rules=Rules(CHAT, 1, 1000)) == [("too_many_requests", None, None)]


def test_errors_of_a_file_are_bounded() -> None:
    assert len(errors_of(*[b"{\n"] * 199)) == MAX_ERRORS


def test_check_can_be_ended_from_within() -> None:
    def end() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        check_input(io.BytesIO(b"".join(line(str(n)) for n in range(1000))), Rules(CHAT, 5000, 1000), end)

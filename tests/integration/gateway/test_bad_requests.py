"""Test that invalid requests get OpenAI's error format, and a status for which its client has an exception."""

from __future__ import annotations

import json
from typing import Any

import openai as errors
import pytest
from openai import OpenAI

from ...gateways import GatewayProcess
from .conftest import CHAT

HELLO = [{"role": "user", "content": "Hi"}]
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
JSON = {"content-type": "application/json"}


def turns(*contents: Any) -> list[Any]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.mark.parametrize(
    ("body", "error", "param", "expected"),
    [
        ({"model": "nope"}, errors.NotFoundError, "model", "'nope' is not served; running models: tiny"),
        ({"model": None}, errors.BadRequestError, "model", "use one of the models listed by /v1/models"),
        ({"model": 3}, errors.BadRequestError, "model", "model is 3"),
        ({"temperature": "hot"}, errors.BadRequestError, "temperature", "temperature is 'hot'"),
        ({"temperature": float("nan")}, errors.BadRequestError, "temperature", "temperature is nan"),
        ({"max_tokens": 0}, errors.BadRequestError, "max_tokens", "max_tokens is 0"),
        ({"max_tokens": 10**30}, errors.BadRequestError, "max_tokens", "max_tokens is"),
        ({"n": 0}, errors.BadRequestError, "n", "n is 0"),
        ({"n": 10_000}, errors.BadRequestError, "n", "n is 10000"),
        ({"stop": [""]}, errors.BadRequestError, "stop", "the text is empty"),
        ({"messages": []}, errors.BadRequestError, "messages", "messages is"),
        ({"messages": None}, errors.BadRequestError, "messages", "messages is missing"),
        ({"messages": "Hi"}, errors.BadRequestError, "messages", "messages is 'Hi'"),
        ({"messages": [IMAGE]}, errors.BadRequestError, "messages", "models can only process text"),
        ({"messages": turns("x " * 9000)}, errors.BadRequestError, None, "the prompt is too long"),
        ({"messages": turns("x " * 9000), "stream": True}, errors.BadRequestError, None, "the prompt is too long"),
        ({"messages": turns("half a pair: \ud800")}, errors.BadRequestError, "messages", "messages.0"),
        ({"stream": "yes"}, errors.BadRequestError, "stream", "stream is 'yes'"),
        (
            {"stream_options": {"include_usage": True}},
            errors.BadRequestError,
            "stream_options",
            "requires stream: true",
        ),
        ({"stream": True, "stream_options": 3}, errors.BadRequestError, "stream_options", "must be an object"),
        ({"service_tier": "scale"}, errors.BadRequestError, "service_tier", "one of auto, flex, default, priority"),
        ({"priority": 0}, errors.BadRequestError, "priority", "use service_tier"),
        ({"cache_scope": "x"}, errors.BadRequestError, "cache_scope", "use cache_salt"),
        ({"cache_salt": ""}, errors.BadRequestError, "cache_salt", "1 to 128"),
        ({"audio": {"voice": "x"}}, errors.BadRequestError, "audio", "answers contain only text"),
        ({"functions": [{"name": "f"}]}, errors.BadRequestError, "functions", "use `tools`"),
        ({"foo": 1}, errors.BadRequestError, "foo", "unknown parameter 'foo'"),
        ({"tools": [{"type": "web"}]}, errors.BadRequestError, "tools", "tools.0"),
        ({"response_format": {"type": "xml"}}, errors.BadRequestError, "response_format", "its type must be"),
        ({"grammar": "root ::= ("}, errors.BadRequestError, None, "grammar"),
        ({"parent_key": "x"}, errors.BadRequestError, "parent_key", "the value is not a key"),
        ({"parent_key": "0" * 64}, errors.NotFoundError, None, ""),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_invalid_body_is_rejected_with_the_field_name(
    gateway: GatewayProcess, body: dict[str, Any], error: type[errors.APIStatusError], param: str | None, expected: str
) -> None:
    answer = gateway.post("/v1/chat/completions", content=json.dumps({**CHAT, **body}), headers=JSON)
    with pytest.raises(error) as caught:
        raise OpenAI(api_key="none")._make_status_error_from_response(answer)
    assert caught.value.param == param
    assert expected in caught.value.message
    assert caught.value.body is not None
    assert {"message", "type", "param", "code"} == set(answer.json()["error"])


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("completions", {"prompt": "a", "echo": True}, "answers do not repeat the prompt"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix: model"),
        ("completions", {"prompt": "a", "best_of": 3}, "use `n`"),
        ("completions", {"prompt": ["a"] * 129}, "the limit is 128"),
        ("completions", {"prompt": ["a", ""]}, "prompt is ''"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {}, "prompt is missing"),
        ("embeddings", {}, "input is missing"),
        ("embeddings", {"input": [""]}, "input"),
        ("embeddings", {"input": "a", "encoding_format": "x"}, "encoding_format"),
        ("embeddings", {"input": "a", "dimensions": 10**6}, "dimensions"),
        ("embeddings", {"input": "a", "priority": 1}, "use service_tier"),
        ("rerank", {"query": "a", "documents": "b"}, "documents is str"),
        ("rerank", {"query": "a", "documents": ["b"]}, "not for rerank"),
        ("rerank", {"documents": ["b"]}, "query is None"),
        ("rerank", {"query": "a", "documents": []}, "provide at least one"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n is 0"),
        ("rerank", {"query": "a", "documents": ["b"], "foo": 1}, "unknown parameter 'foo'"),
        ("completions", {"prompt": "a", "idempotency_key": "k"}, "unknown parameter 'idempotency_key'"),
        ("responses", {"input": "a", "wait": True}, "unknown parameter 'wait'"),
        ("messages", {"messages": [], "max_tokens": 1, "self": 1}, "unknown parameter 'self'"),
    ],
)
def test_other_endpoints_reject_invalid_bodies(
    gateway: GatewayProcess, path: str, body: dict[str, Any], expected: str
) -> None:
    answer = gateway.post(f"/v1/{path}", json={"model": "tiny", **body})
    assert answer.status_code == 400, answer.text
    assert expected in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "headers", "status", "expected"),
    [
        (b"{", JSON, 400, "the body is not valid JSON"),
        (b"[]", JSON, 400, "the body is list, not an object"),
        (b"[" * 100_000, JSON, 400, "the body is not valid JSON"),
        (b'{"model": "\xff"}', JSON, 400, "not valid UTF-8 at byte 11"),
        (b"a=1", {"content-type": "application/x-www-form-urlencoded"}, 415, "send application/json"),
        (json.dumps(CHAT).encode(), {}, 415, "content-type is ''"),
        (b"{}", {**JSON, "content-encoding": "gzip"}, 415, "send the body without compression"),
        (b"x" * (17 << 20), JSON, 413, "the body has more than 16777216 bytes"),
        (json.dumps({**CHAT, "messages": turns("x" * (5 << 20))}).encode(), JSON, 400, "bytes, and the limit is"),
        (json.dumps(CHAT).encode(), {**JSON, "idempotency-key": "x" * 300}, 400, "Idempotency-Key has 300 characters"),
        (json.dumps(CHAT).encode(), {**JSON, "host": "evil.example"}, 403, "'evil.example'; use 127.0.0.1, or create"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_malformed_body_is_rejected(
    gateway: GatewayProcess, content: bytes, headers: dict[str, str], status: int, expected: str
) -> None:
    answer = gateway.post("/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert expected in answer.json()["error"]["message"]


def test_unknown_paths_and_methods_return_errors_in_the_documented_format(gateway: GatewayProcess) -> None:
    assert gateway.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert gateway.get("/v1/chat/completions").status_code == 405
    assert gateway.get("/v1/models/nope").json()["error"]["code"] == "model_not_found"


def test_request_id_comes_from_the_client_or_is_generated(gateway: GatewayProcess, openai: OpenAI) -> None:
    own = gateway.get("/health", headers={"x-request-id": "mine-1"})
    assert own.headers["x-request-id"] == "mine-1"
    forged = gateway.get("/health", headers={"x-request-id": "a b"})
    assert forged.headers["x-request-id"].startswith("req_")
    with pytest.raises(errors.NotFoundError) as caught:
        openai.models.retrieve("nope")
    assert (caught.value.request_id or "").startswith("req_")

"""Test that invalid requests for files and batches get OpenAI's error format, and a status that its client handles.

They leave no data behind.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai as errors
import pytest
from openai import OpenAI
from starlette.testclient import TestClient

from cellama.api.http import create_app
from cellama.api.http.keys import key_access
from cellama.api.http.keys.access import connect_keys
from cellama.api.keys.entry import KeyEntry, new_key
from cellama.api.keys.store import KeyStore

from .world import CHAT, lines_of, request, settings_for

JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=B"}
FILE = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
PURPOSE = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
END = b"--B--\r\n"
ORDER = {"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h"}
MAX_BODY, MAX_FILE = 4096, 8192
LONGEST_MESSAGE = 500


def order(**changed: Any) -> dict[str, Any]:
    """Return the body of a request for a batch."""
    return {"content": json.dumps({**ORDER, **changed}), "headers": JSON}


def body(content: bytes, **headers: str) -> dict[str, Any]:
    return {
        "content": content,
        "headers": {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}},
    }


def form(*parts: bytes, **headers: str) -> dict[str, Any]:
    return {"content": b"".join(parts), "headers": {**FORM, **_named(headers)}}


def _named(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.fixture
def client(url: str, tmp_path: Path) -> Iterator[TestClient]:
    """Return a client of a gateway without workers. Unexpected errors become responses, as with a real server."""
    bounds = {"gateway_max_body_bytes": MAX_BODY, "gateway_max_file_bytes": MAX_FILE}
    with TestClient(create_app(settings_for(url, tmp_path, **bounds)), raise_server_exceptions=False) as client:
        yield client


def refusal(answer: httpx.Response) -> errors.APIStatusError:
    """Return the error that OpenAI's client raises."""
    assert {"message", "type", "param", "code"} == set(answer.json()["error"])
    assert len(answer.content) < 2 * LONGEST_MESSAGE
    return OpenAI(api_key="none")._make_status_error_from_response(answer)


BATCHES: list[tuple[dict[str, Any], type[errors.APIStatusError], int, str | None, str]] = [
    (body(b"{"), errors.BadRequestError, 400, None, "not valid JSON"),
    (body(b""), errors.BadRequestError, 400, None, "not valid JSON"),
    (body(b"[]"), errors.BadRequestError, 400, None, "not an object"),
    (body(b"[" * MAX_BODY), errors.BadRequestError, 400, None, "not valid JSON"),
    (body(b'{"input_file_id": "\xff"}'), errors.BadRequestError, 400, None, "not valid UTF-8 at byte 19"),
    (body(b" " * (MAX_BODY + 1)), errors.APIStatusError, 413, None, "more than 4096 bytes"),
    (body(b"{}", content_encoding="gzip"), errors.APIStatusError, 415, None, "without compression"),
    (body(b"{}", content_type="text/plain"), errors.APIStatusError, 415, None, "application/json"),
    (body(b"{}"), errors.BadRequestError, 400, "input_file_id", "must be the id of a file"),
    (order(input_file_id=["a"]), errors.BadRequestError, 400, "input_file_id", "must be the id of a file"),
    (order(), errors.NotFoundError, 404, None, "file 'file-none' does not exist"),
    (order(input_file_id="\ud800"), errors.NotFoundError, 404, None, "does not exist"),
    (order(input_file_id="x" * 3000), errors.NotFoundError, 404, None, "does not exist"),
    (order(endpoint="/v1/nothing"), errors.BadRequestError, 400, "endpoint", "must be one of"),
    (order(endpoint={}), errors.BadRequestError, 400, "endpoint", "must be one of"),
    (order(completion_window=24), errors.BadRequestError, 400, "completion_window", "such as '24h'"),
    (order(completion_window="٣h"), errors.BadRequestError, 400, "completion_window", "such as '24h'"),
    (order(metadata="a"), errors.BadRequestError, 400, "metadata", "must be an object"),
    (order(metadata={"a": ["b"]}), errors.BadRequestError, 400, "metadata", "strings of at most 512"),
    (order(output_expires_after=3), errors.BadRequestError, 400, "output_expires_after", "output_expires_after"),
    (order(**{"x" * 1000: 1}), errors.BadRequestError, 400, "x" * 1000, "unknown parameter"),
    (body(b"{}", idempotency_key="x" * 300), errors.BadRequestError, 400, None, ""),
]
FILES: list[tuple[dict[str, Any], type[errors.APIStatusError], int, str | None, str]] = [
    ({"json": {}}, errors.APIStatusError, 415, None, "multipart/form-data"),
    ({"content": b""}, errors.APIStatusError, 415, None, "multipart/form-data"),
    (form(PURPOSE, END), errors.BadRequestError, 400, "file", "file is missing"),
    (form(FILE, END), errors.BadRequestError, 400, "purpose", "purpose is missing"),
    (form(PURPOSE, FILE.replace(b"{}", b""), END), errors.BadRequestError, 400, "file", "file is empty"),
    (form(PURPOSE, FILE, FILE, END), errors.BadRequestError, 400, "file", "it must have exactly one"),
    (form(PURPOSE, FILE), errors.BadRequestError, 400, None, "in the middle"),
    (form(b"{}"), errors.BadRequestError, 400, None, "not a valid form"),
    (form(PURPOSE.replace(b"batch", b"\xff"), FILE, END), errors.BadRequestError, 400, None, "not a valid form"),
    (form(PURPOSE.replace(b'"purpose"', b'"\xff"'), FILE, END), errors.BadRequestError, 400, None, "not a valid form"),
    (form(PURPOSE, FILE.replace(b"{}", b"x" * (MAX_FILE + 1)), END), errors.APIStatusError, 413, None, "8192 bytes"),
    (form(PURPOSE, FILE, END, content_encoding="gzip"), errors.APIStatusError, 415, None, "without compression"),
]


@pytest.mark.parametrize(("sent", "error", "status", "param", "expected"), BATCHES)
def test_create_batch_rejects_invalid_requests(
    client: TestClient,
    url: str,
    sent: dict[str, Any],
    error: type[errors.APIStatusError],
    status: int,
    param: str | None,
    expected: str,
) -> None:
    raised = refusal(client.post("/v1/batches", **sent))
    assert (type(raised), raised.status_code) == (error, status)
    assert expected in raised.message
    if param is not None:
        assert (raised.param or "").startswith(param[:40])
    assert client.get("/v1/batches").json()["data"] == []


@pytest.mark.parametrize(("sent", "error", "status", "param", "expected"), FILES)
def test_upload_rejects_invalid_requests(
    client: TestClient,
    tmp_path: Path,
    sent: dict[str, Any],
    error: type[errors.APIStatusError],
    status: int,
    param: str | None,
    expected: str,
) -> None:
    raised = refusal(client.post("/v1/files", **sent))
    assert (type(raised), raised.status_code, raised.param) == (error, status, param)
    assert expected in raised.message
    assert client.get("/v1/files").json()["data"] == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


PATHS = [
    ("GET", "/v1/files/{}"),
    ("DELETE", "/v1/files/{}"),
    ("GET", "/v1/files/{}/content"),
    ("GET", "/v1/batches/{}"),
    ("POST", "/v1/batches/{}/cancel"),
]


@pytest.mark.parametrize("thing_id", ["none", "%00", "%ff", "%ed%a0%80", "..", "a%0d%0ab", "x" * 5000, "*"])
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_endpoints_return_404_for_unknown_ids(client: TestClient, method: str, path: str, thing_id: str) -> None:
    raised = refusal(client.request(method, path.format(thing_id)))
    assert isinstance(raised, errors.NotFoundError)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
@pytest.mark.parametrize("query", ["limit=a", "limit=-1", "limit=1e3", "limit=" + "9" * 5000, "order=%ff"])
def test_list_error_names_the_invalid_parameter(client: TestClient, path: str, query: str) -> None:
    raised = refusal(client.get(f"{path}?{query}"))
    assert isinstance(raised, errors.BadRequestError)
    assert raised.param == query.partition("=")[0]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
@pytest.mark.parametrize("after", ["none", "%00", "%ff", "x" * 5000])
def test_list_returns_404_when_the_after_id_is_unknown(client: TestClient, path: str, after: str) -> None:
    assert isinstance(refusal(client.get(f"{path}?after={after}")), errors.NotFoundError)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/a", "/v1/files/a/content", "/v1/batches", "/v1/batches/a"])
def test_endpoints_return_405_for_other_methods(client: TestClient, path: str) -> None:
    raised = refusal(client.patch(path, json={}))
    assert (raised.status_code, type(raised)) == (405, errors.APIStatusError)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-none"}, {"x-api-key": "\xe9" * 500}])
def test_endpoints_return_401_without_a_key(url: str, tmp_path: Path, headers: Mapping[str, str]) -> None:
    async def make_key() -> None:
        key = new_key()
        async with connect_keys(url) as redis:
            entry = KeyEntry.model_validate({"id": key.id, "digest": key.digest, "tenant": "acme"})
            await KeyStore(redis).write(entry)

    asyncio.run(make_key())
    settings = settings_for(url, tmp_path)
    arguments = [*((method, path.format("a")) for method, path in PATHS)]
    arguments += [(method, path) for method in ("GET", "POST") for path in ("/v1/files", "/v1/batches")]
    with TestClient(create_app(settings, access=key_access(settings))) as client:
        for method, path in arguments:
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            sent: Any = {"content": lines_of([request("a")])} if method == "POST" else {}
            assert isinstance(refusal(client.request(method, path, headers=raw, **sent)), errors.AuthenticationError)

"""Test paths from wrong base URLs, the root, and errors for unknown paths and wrong methods."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from cellama.api.http import create_app
from cellama.api.http.paths import canonical_path
from cellama.config import Settings


@pytest.fixture(scope="module")
def http() -> TestClient:
    return TestClient(create_app(Settings(gateway_console="on")), follow_redirects=False)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("//chat/completions", "/v1/chat/completions"),
        ("/v1/unknown/", "/v1/unknown"),
        ("/v1beta/chat/completions", "/v1beta/chat/completions"),
        ("/v1/models/v1/a//b", "/v1/models/v1/a//b"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/health/", "/health"),
        ("/unknown", "/unknown"),
        ("/v1", "/v1"),
        ("/v1/", "/v1"),
        ("/", "/"),
        ("", "/"),
        ("/console/jobs/", "/console/jobs/"),
    ],
)
def test_canonical_path_identifies_the_endpoint(path: str, expected: str) -> None:
    assert canonical_path(path, {"chat", "models"}) == expected


def test_wrong_method_gets_405_with_all_methods_of_the_path(http: TestClient) -> None:
    for path in ("/v1/files", "/files/", "/v1/v1/files"):
        answer = http.put(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD, POST")
        assert answer.json()["error"]["message"].endswith("/v1/files: Method Not Allowed; use GET, HEAD, POST")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/v1/messages/batches", {}, 404),
        ("POST", "/messages/batches", {}, 404),
        ("GET", "/v1/messages", {}, 405),
        ("GET", "/v1/skills", {"anthropic-version": "2023-06-01"}, 404),
    ],
)
def test_errors_for_anthropic_clients_use_anthropics_envelope(
    http: TestClient, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = http.request(method, path, headers=headers)
    body = answer.json()
    assert (answer.status_code, body["type"], body["request_id"]) == (status, "error", answer.headers["request-id"])
    assert set(body["error"]) == {"type", "message"}


def test_other_unknown_paths_use_openais_envelope(http: TestClient) -> None:
    for path in ("/v1/nothing", "/v1/messagesx", "/nothing"):
        answer = http.get(path, headers={"x-api-key": "sk-x"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        assert "docs/reference/gateway.md lists the endpoints" in answer.json()["error"]["message"]


def test_root_answers_clients_and_redirects_browsers_to_the_console(http: TestClient) -> None:
    assert http.get("/").json()["console"] == "/console"
    assert http.head("/").status_code == 200
    seen = http.get("/", headers={"accept": "text/html,*/*"})
    assert (seen.status_code, seen.headers["location"]) == (303, "/console")
    without: Any = TestClient(create_app(Settings(gateway_console="off")))
    assert "console" not in without.get("/", headers={"accept": "text/html"}).json()


def test_paths_are_found_in_a_mounted_app() -> None:
    mounted = TestClient(Starlette(routes=[Mount("/llm", create_app(Settings()))]))
    for path in ("/llm/v1/files", "/llm/files", "/llm/v1/v1/files/"):
        assert mounted.put(path).status_code == 405
    assert mounted.get("/llm/messages").json()["type"] == "error"
    assert mounted.get("/llm/").json()["service"] == "cellama"

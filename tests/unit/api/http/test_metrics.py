"""Test who can read the gateway's /metrics, and what they count."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from cellama.api.http import create_app
from cellama.api.http.gateway import RequestCounts
from cellama.config import Settings
from cellama.tasks.metrics.exposition import text_of

from ....prometheus_text import sample

TOKEN = "a-token-of-sixteen-or-more"
HERE, ELSEWHERE = ("127.0.0.1", 5), ("203.0.113.9", 5)


def client(at: tuple[str, int] = HERE, **settings: Any) -> TestClient:
    return TestClient(create_app(Settings(**settings)), base_url="http://127.0.0.1", client=at)


def test_requests_are_counted_by_route_and_status() -> None:
    with client() as http:
        for path in ("/health", "/health", "/v1/nothing-here", "/../etc"):
            http.get(path)
        text = http.get("/metrics").text
    labels = {"route": "/health", "method": "GET", "status": "200"}
    assert sample(text, "cellama_http_requests_total", **labels) == 2
    assert sample(text, "cellama_http_requests_total", route="other", status="404") == 2
    assert sample(text, "cellama_http_first_byte_seconds_count", route="/health") == 2
    assert sample(text, "cellama_http_requests_in_flight") == 1  # the request for the metrics
    assert "nothing-here" not in text


@pytest.mark.parametrize(
    ("at", "headers", "status"),
    [
        (HERE, {}, 200),
        (ELSEWHERE, {}, 403),
        (HERE, {"host": "attacker.example"}, 403),
        (HERE, {"x-forwarded-for": "203.0.113.9"}, 403),
    ],
)
def test_metrics_without_a_token_are_only_available_locally(at: Any, headers: dict[str, str], status: int) -> None:
    with client(at) as http:
        answer = http.get("/metrics", headers=headers)
    assert answer.status_code == status
    assert (status == 200) != ("gateway_metrics_token" in answer.text)


@pytest.mark.parametrize(
    ("given", "status"),
    [(f"Bearer {TOKEN}", 200), (f"bearer {TOKEN} ", 200), ("Bearer wrong", 401), (TOKEN, 401), ("", 401)],
)
def test_metrics_are_readable_from_anywhere_with_a_token(given: str, status: int) -> None:
    with client(ELSEWHERE, gateway_metrics_token=TOKEN) as http:
        headers = {"authorization": given} if given else {}
        assert http.get("/metrics", headers=headers).status_code == status


def test_unexpected_error_is_counted_as_500(monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(Settings())

    def fail(*_: Any) -> Any:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(app.state.gateway.access, "authenticate", fail)
    with TestClient(app, base_url="http://127.0.0.1", client=HERE, raise_server_exceptions=False) as http:
        assert http.get("/v1/models").status_code == 500
        text = http.get("/metrics").text
    assert sample(text, "cellama_http_requests_total", route="/v1/models", status="500") == 1


def test_tokens_are_counted_by_tenant() -> None:
    counts = RequestCounts()
    first = {"prompt_tokens": 5, "completion_tokens": 7, "cached_tokens": 2}
    counts.count_tokens("acme", [first, {"prompt_tokens": 1}])
    counts.count_tokens(None, [{"prompt_tokens": 3}])
    text = text_of(counts.figures()).decode()
    for kind, tokens in (("prompt", 6), ("generated", 7), ("cached", 2)):
        assert sample(text, "cellama_tenant_tokens_total", tenant="acme", kind=kind) == tokens
    assert sample(text, "cellama_tenant_tokens_total", tenant="", kind="prompt") == 3

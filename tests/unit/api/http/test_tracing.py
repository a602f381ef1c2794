"""Test the gateway's spans for requests that may create jobs."""

from __future__ import annotations

from starlette.testclient import TestClient

from cellama.api.http import create_app
from cellama.config import Settings

from ...tasks.traces.conftest import ABOVE, Spans, spans

__all__ = ["spans"]


def test_request_span_is_a_child_of_the_client_span(spans: Spans) -> None:
    with TestClient(create_app(Settings())) as http:
        http.get("/health", headers=ABOVE)
        http.post("/v1/completions", headers=ABOVE, content=b"no JSON")
        http.post("/nothing/here")
    received = spans.one("POST /v1/completions")
    assert received.parent.span_id == 0x00F067AA0BA902B7
    assert dict(received.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 415,
    }
    assert {span.name for span in spans.all} == {"POST /v1/completions", "POST"}
    assert spans.one("POST").parent is None

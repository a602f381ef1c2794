"""Pages in browsers may ask only where a setting says so: api/http/app.py."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from cellama.api.http import create_app
from cellama.config import Settings

ORIGIN = "https://chat.example.org"
ASKS = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}


def headers_for(*origins: str) -> dict[str, str]:
    settings = Settings(gateway_cors_origins=list(origins))
    return dict(TestClient(create_app(settings)).options("/v1/messages", headers=ASKS).headers)


def test_no_page_may_ask_unless_a_setting_says_so() -> None:
    assert not [name for name in headers_for() if name.startswith("access-control")]


@pytest.mark.parametrize("origin", [ORIGIN, "*"])
def test_page_of_a_named_origin_may_ask(origin: str) -> None:
    headers = headers_for(origin)
    assert headers["access-control-allow-origin"] == origin
    assert "x-api-key" in headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in headers


def test_page_reads_the_headers_that_clients_go_by() -> None:
    app = create_app(Settings(gateway_cors_origins=[ORIGIN]))
    read = TestClient(app).get("/health", headers={"origin": ORIGIN}).headers["access-control-expose-headers"]
    assert {"x-request-id", "x-should-retry", "retry-after-ms", "x-ratelimit-reset-tokens"} <= set(read.split(", "))


def test_page_of_another_origin_may_not_ask() -> None:
    assert "access-control-allow-origin" not in headers_for("https://other.example.org")


@pytest.mark.parametrize("origins", [["chat.example.org"], ["https://chat.example.org/"], ["*", ORIGIN]])
def test_what_is_no_origin_is_refused(origins: list[str]) -> None:
    with pytest.raises(ValidationError):
        Settings(gateway_cors_origins=origins)

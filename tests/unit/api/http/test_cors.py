"""Test the access of web pages, which a setting must allow."""

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


def test_cors_is_disabled_by_default() -> None:
    assert not [name for name in headers_for() if name.startswith("access-control")]


@pytest.mark.parametrize("origin", [ORIGIN, "*"])
def test_preflight_is_allowed_for_configured_origins(origin: str) -> None:
    headers = headers_for(origin)
    assert headers["access-control-allow-origin"] == origin
    assert "x-api-key" in headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in headers


def test_cors_exposes_the_headers_that_clients_read() -> None:
    app = create_app(Settings(gateway_cors_origins=[ORIGIN]))
    read = TestClient(app).get("/health", headers={"origin": ORIGIN}).headers["access-control-expose-headers"]
    assert {"x-request-id", "x-should-retry", "retry-after-ms", "x-ratelimit-reset-tokens"} <= set(read.split(", "))


def test_preflight_is_rejected_for_other_origins() -> None:
    assert "access-control-allow-origin" not in headers_for("https://other.example.org")


@pytest.mark.parametrize("origins", [["chat.example.org"], ["https://chat.example.org/"], ["*", ORIGIN]])
def test_invalid_cors_origin_is_rejected(origins: list[str]) -> None:
    with pytest.raises(ValidationError):
        Settings(gateway_cors_origins=origins)

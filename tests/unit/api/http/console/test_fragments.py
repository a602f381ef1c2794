"""A part of a page is rendered only if it shows something new."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from cellama.api.http.auth import Caller
from cellama.api.http.console import rendering
from cellama.api.http.console.rendering import age_text, fragment

EMPTY = {"rows": [], "unlisted": None, "next_query": "", "has_filters": False, "after": "", "first_query": ""}


def requested(context: dict[str, Any], etag: str = "", caller: Caller | None = None, root_path: str = "") -> Response:
    headers = [(b"if-none-match", etag.encode())] if etag else []
    scope = {"type": "http", "method": "GET", "path": "/console/jobs/list", "headers": headers, "query_string": b""}
    request = Request({**scope, "root_path": root_path, "server": ("host", 80), "scheme": "http"})
    request.state.console_caller = caller or Caller()
    return fragment(request, "_jobs.html", **context)


def test_fragment_is_not_rerendered_when_its_content_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    first = requested(EMPTY)
    assert (first.status_code, b"no jobs yet" in bytes(first.body)) == (200, True)
    monkeypatch.setattr(rendering, "page", lambda *_, **__: pytest.fail("the fragment was rendered"))
    again = requested(EMPTY, first.headers["etag"])
    assert (again.status_code, bytes(again.body), again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert again.headers["cache-control"] == "no-store"


def test_fragment_is_rendered_when_its_content_or_viewer_changes() -> None:
    etag = requested(EMPTY).headers["etag"]
    assert requested({**EMPTY, "has_filters": True}, etag).status_code == 200
    assert requested(EMPTY, etag, Caller(key_id="key", tenant="acme")).status_code == 200
    assert requested(EMPTY, etag, root_path="/llm").status_code == 200


def test_age_is_shown_in_one_unit() -> None:
    ages = {-1: "0 s ago", 0.4: "0 s ago", 12: "12 s ago", 200: "3 min ago", 7500: "2 h ago", 90000: "1 d ago"}
    assert {age: age_text(age) for age in ages} == ages

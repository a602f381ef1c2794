"""Test the parsing of request bodies."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Message

from cellama.api.http.auth import NoKeys
from cellama.api.http.errors import ApiError
from cellama.api.http.gateway import Gateway
from cellama.api.http.middleware import RequestMiddleware
from cellama.api.http.parsing import LARGE_BYTES, MAX_VALUES, ParsedRequest, count_values, read
from cellama.config import get_settings

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def num_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(num_values, inner))


@given(JSON, st.integers(1, 20), st.booleans())
def test_count_values_is_an_upper_bound_below_the_limit_and_exact_above_the_limit(
    value: Any, limit: int, is_ascii: bool
) -> None:
    raw = json.dumps(value, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    counted, exact = count_values(raw, limit), num_values(value)
    assert (counted > limit) == (exact > limit) or 0 <= counted - exact <= raw.count(b"{") + raw.count(b"[")


def test_count_values_counts_a_string_with_commas_once() -> None:
    text = 'a,[{"\\' * MAX_VALUES
    assert count_values(json.dumps({"prompt": text}).encode(), MAX_VALUES) < 10
    assert count_values(b"[" + b"1," * (2 * MAX_VALUES) + b"1]", MAX_VALUES) == MAX_VALUES + 1


def parsed_request(body: bytes) -> ParsedRequest:
    """Return the parsed request for this body."""
    gateway, found = Gateway(get_settings(), NoKeys()), list[ParsedRequest]()

    class App:
        class state:  # noqa: N801
            pass

    App.state.gateway = gateway  # type: ignore[attr-defined]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(await read(Request(scope, receive)))

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def handle() -> None:
        scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")], "app": App}
        await RequestMiddleware(app, gateway, ())(scope, receive, receive)
        assert gateway.body_memory.num_bytes == 0

    asyncio.run(handle())
    return found[0]


def thread_of(parsed: ParsedRequest) -> str:
    return asyncio.run(parsed.read_by(lambda: threading.current_thread().name))


def test_large_body_is_parsed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()

    def noted(parse: Callable[[str], Any]) -> Callable[[str], Any]:
        def parsed(text: str) -> Any:
            threads.append(threading.current_thread().name)
            return parse(text)

        return parsed

    monkeypatch.setattr("cellama.api.http.parsing.json.loads", noted(json.loads))
    monkeypatch.setattr("cellama.api.http.parsing.from_json", noted(from_json))
    small, large = (parsed_request(b'{"prompt": "' + b"x" * size + b'"}') for size in (10, LARGE_BYTES))
    assert [name.partition("_")[0] for name in threads] == ["MainThread", "cellama-bodies"]
    assert thread_of(small) == "MainThread"
    assert thread_of(large).startswith("cellama-bodies")


@pytest.mark.parametrize("body", ['{"a": }', '{"a": "\\ud800"}', '{"a": ' + "[" * 1000 + "]" * 1000 + "}", "[1]"])
def test_large_invalid_body_is_rejected(body: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed_request(body.ljust(LARGE_BYTES + 1).encode())
    assert refused.value.status == 400
    assert refused.value.message.startswith("the body is ")


def test_body_with_too_many_values_is_rejected_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellama.api.http.parsing.from_json", lambda text: pytest.fail("it is read"))
    with pytest.raises(ApiError, match="more than 262144 values"):
        parsed_request(b'{"prompt": [' + b"1," * MAX_VALUES + b"1]}")

"""Limits of the gateway before a body is read: slow, large and concurrent requests, with keys and without a worker."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cellama.api.http.parsing import MAX_VALUES
from cellama.api.machine.redis_server import RedisServer

from ..conftest import PATIENCE_S, empty_database, wait_until
from ..gateways import GatewayProcess
from .test_gateway_keys import make_key

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
Start = Callable[..., GatewayProcess]


@pytest.fixture
def start(redis_server: RedisServer, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a gateway on an empty database.

    It creates a key for each dict of fields in `keys`, and the attribute `keys` has the headers with these keys.
    """
    with empty_database(redis_server, 11) as url, ExitStack() as ending:

        def start(keys: list[dict[str, Any]] | None = None, **settings: Any) -> GatewayProcess:
            texts = [asyncio.run(make_key(url, **fields)).text for fields in keys or []]
            own = {f"CELLAMA_{name.upper()}": str(value) for name, value in settings.items()}
            gateway = GatewayProcess(tmp_path, url, **own)
            ending.callback(gateway.stop)
            gateway.keys = [{"authorization": f"Bearer {text}"} for text in texts]  # type: ignore[attr-defined]
            return gateway.wait_ready("/health")

        yield start


@dataclass(frozen=True)
class Door:
    """A gateway with default settings, for all tests that use their own key."""

    gateway: GatewayProcess
    url: str

    def key(self, **fields: Any) -> dict[str, str]:
        """Create a key with these fields, and return the header with the key."""
        return {"authorization": f"Bearer {asyncio.run(make_key(self.url, **fields)).text}"}


@pytest.fixture(scope="module")
def door(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with empty_database(redis_server, 14) as url:
        asyncio.run(make_key(url))  # once a key exists, every client needs one
        gateway = GatewayProcess(tmp_path_factory.mktemp("door"), url)
        try:
            yield Door(gateway.wait_ready("/health"), url)
        finally:
            gateway.stop()


def keys_of(gateway: GatewayProcess) -> list[dict[str, str]]:
    keys: list[dict[str, str]] = gateway.keys  # type: ignore[attr-defined]
    return keys


class Sender:
    """A client that sends a request piece by piece."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._socket = socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S)

    def begin(self, headers: dict[str, str], size: int, path: str = CHAT) -> Sender:
        """Send the headers of a request with a body of this size, and the first byte of the body."""
        lines = {"host": "127.0.0.1", **JSON, **headers, "content-length": str(size)}
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.send(head.encode() + b"\r\n{")
        return self

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def rest(self) -> str:
        """Return everything that arrives until the gateway closes the connection."""
        parts = []
        while part := self._socket.recv(1 << 16):
            parts.append(part)
        return b"".join(parts).decode()

    def is_closed(self, data: bytes) -> bool:
        """Send this data, and return whether the gateway has closed the connection."""
        try:
            self.send(data)
            return self._socket.recv(1 << 16, socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def sender() -> Iterator[Callable[[GatewayProcess], Sender]]:
    with ExitStack() as closing:

        def connect(gateway: GatewayProcess) -> Sender:
            sender = Sender(gateway)
            closing.callback(sender.close)
            return sender

        yield connect


def refusal(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


def test_rejected_body_counts_as_a_request(door: Door) -> None:
    gateway, key = door.gateway, door.key(requests_per_minute=3)
    token_ids = b'{"model": "tiny", "prompt": [' + b"1," * MAX_VALUES + b"1]}"
    refused = [
        gateway.post("/v1/completions", content=token_ids, headers={**JSON, **key}),
        gateway.post(CHAT, content=b"{", headers={**JSON, **key}),
        gateway.post("/v1/files", headers=key),
    ]
    assert [answer.status_code for answer in refused] == [400, 400, 415]
    assert f"more than {MAX_VALUES} values" in refused[0].json()["error"]["message"]
    for path in ("/v1/completions", CHAT, "/v1/files", "/v1/batches", "/v1/embeddings", "/v1/responses", "/tokenize"):
        answer = gateway.post(path, content=b"{}", headers={**JSON, **key})
        assert refusal(answer) == (429, "rate_limit_exceeded")
        assert 0 < int(answer.headers["retry-after"]) <= 60
    assert gateway.get("/v1/models", headers=key).status_code == 200


def test_request_counts_as_a_job_while_its_body_is_received(
    door: Door, sender: Callable[[GatewayProcess], Sender]
) -> None:
    gateway, key = door.gateway, door.key(concurrent_jobs=1)
    slow = sender(gateway).begin(key, 2)

    def post() -> httpx.Response:
        return gateway.post(CHAT, content=b"{}", headers={**JSON, **key})

    wait_until(lambda: post().status_code == 429, "a refusal during another upload")
    slow.send(b"}")
    wait_until(lambda: post().status_code == 400, "the end of the other request")


def test_memory_for_bodies_is_limited_per_key_and_in_total(
    start: Start, sender: Callable[[GatewayProcess], Sender]
) -> None:
    gateway = start(
        [{}, {"tenant": "b"}, {"tenant": "c"}], gateway_key_bodies_bytes=100_000, gateway_bodies_bytes=200_000
    )
    key, other, third = keys_of(gateway)
    large = b'{"model": "' + b"x" * 80_000 + b'"}'

    def post(who: dict[str, str]) -> tuple[int, str | None]:
        answer = gateway.post(CHAT, content=large, headers={**JSON, **who})
        assert answer.status_code < 429 or int(answer.headers["retry-after"]) >= 1
        return refusal(answer)

    unserved = post(key)
    assert unserved[0] in (404, 503)
    slow = [sender(gateway).begin(who, 90_000) for who in (key, other)]
    slow[0].send(b" " * 70_000)
    wait_until(lambda: post(key) == (429, "too_many_bytes"), "a refusal of the key's second large body")
    assert post(other) == unserved
    slow[1].send(b" " * 60_000)
    wait_until(lambda: post(third) == (503, "overloaded"), "a refusal of any large body")
    for one in slow:
        one.close()
    wait_until(lambda: post(key) == post(third) == unserved, "room again")


def test_concurrent_requests_are_limited_and_healthz_still_answers(
    start: Start, sender: Callable[[GatewayProcess], Sender]
) -> None:
    gateway = start(gateway_max_requests=1)
    slow = sender(gateway).begin({}, 2)

    def post() -> httpx.Response:
        return gateway.post(CHAT, content=b"{}", headers=JSON)

    wait_until(lambda: post().status_code == 503 and refusal(post()) == (503, "overloaded"), "a refusal")
    assert gateway.get("/health").status_code == 200
    slow.send(b"}")
    wait_until(lambda: post().status_code == 400, "the end of the other request")


def test_connection_with_slow_headers_is_closed(start: Start, sender: Callable[[GatewayProcess], Sender]) -> None:
    gateway = start(gateway_head_timeout_s=1)
    silent, slow, quick = (sender(gateway) for _ in range(3))
    slow.send(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ")
    quick.begin({"connection": "close"}, 2)
    wait_until(lambda: silent.is_closed(b""), "the end of the silent connection")
    wait_until(lambda: slow.is_closed(b"x"), "the end of the slow connection")
    quick.send(b"}")  # its headers arrived in time
    assert quick.rest().startswith("HTTP/1.1 400")


def test_slow_body_gets_408_and_a_rejected_body_is_not_read_completely(
    start: Start, sender: Callable[[GatewayProcess], Sender]
) -> None:
    gateway = start([{"concurrent_jobs": 1}], gateway_head_timeout_s=1, gateway_body_timeout_s=1)
    [key] = keys_of(gateway)
    refused = sender(gateway).begin({}, 1_000_000)  # the request has no key
    wait_until(lambda: refused.is_closed(b" "), "the end of the connection")
    for path in (CHAT, "/v1/messages"):
        slow = sender(gateway).begin(key, 100, path)
        head, _, body = slow.rest().partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 408")
        assert "gateway_body_timeout_s" in json.loads(body)["error"]["message"]
    wait_until(
        lambda: gateway.post(CHAT, content=b"{}", headers={**JSON, **key}).status_code == 400, "the end of its charge"
    )


PAGES: list[tuple[dict[str, str], int]] = [
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://127.0.0.1:1"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"origin": "https://chat.example", "sec-fetch-site": "cross-site"}, 200),
    ({"origin": "app://notes.md"}, 200),
    ({"sec-fetch-site": "same-origin"}, 200),
    ({}, 200),
]


def test_cross_site_request_is_rejected_without_keys(start: Start) -> None:
    gateway = start(gateway_cors_origins="https://chat.example,app://notes.md")
    own = {"origin": gateway.url, "sec-fetch-site": "same-origin"}
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"{}")}}
    for headers, status in [*PAGES, (own, 200)]:
        answer = gateway.post("/v1/files", headers=headers, **form)
        assert answer.status_code == status, (headers, answer.text)
        if status == 403:
            assert answer.json()["error"]["code"] == "origin_not_allowed"
            assert "gateway_cors_origins" in answer.json()["error"]["message"]
    listed = gateway.get("/v1/files", headers={"origin": "https://evil.example"}).json()["data"]
    assert len(listed) == sum(status == 200 for _, status in PAGES) + 1
    path = f"/v1/files/{listed[0]['id']}"
    for method, url in (("DELETE", path), ("POST", "/v1/batches/batch_x/cancel"), ("POST", CHAT)):
        answer = httpx.request(method, gateway.url + url, headers={**JSON, "origin": "https://evil.example"})
        assert answer.status_code == 403, (method, url)


def test_pages_from_any_origin_may_use_a_key(door: Door) -> None:
    headers = {**JSON, **door.key(), "origin": "https://evil.example"}
    answer = door.gateway.post(CHAT, content=b"{}", headers=headers)
    assert answer.status_code == 400


def test_key_cannot_use_unlisted_adapters(door: Door) -> None:
    gateway, key = door.gateway, door.key(adapters=["mine"])
    adapters: dict[str, Any] = {"adapters": ["theirs"]}
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    }
    for path, body in bodies.items():
        answer = gateway.post(path, json={"model": "tiny", **body, **adapters}, headers=key)
        assert answer.status_code == 403, (path, answer.text)
        assert "may not use the adapter 'theirs'; it may use: mine" in answer.json()["error"]["message"]
        assert gateway.post(path, json={"model": "tiny", **body, "adapters": "mine"}, headers=key).status_code == 503

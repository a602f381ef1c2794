"""Run a proxy that forwards requests unchanged, and records the requests with their answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 600.0
_OF_CONNECTION = {
    "connection",
    "content-length",
    "transfer-encoding",
    "date",
    "server",
}  # headers that are not passed on

Before = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Exchange:
    """A request and its answer.

    `body` is empty unless the request body is a JSON object. Header names are lower case.
    """

    method: str
    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]  # of the request
    status: int
    answer: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON objects in the answer's server-sent events, or the answer itself if it is a single JSON object."""
        lines = [line.removeprefix("data: ") for line in self.answer.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines or [self.answer] if line.startswith("{")]

    @property
    def usage(self) -> tuple[int, int, int]:
        """The numbers of prompt tokens, cached prompt tokens and reply tokens, read from any API's format.

        Raises KeyError if the answer does not contain usage.
        """
        usage: dict[str, Any] = {}
        for event in self.events:
            for place in (event, event.get("message"), event.get("response")):
                usage |= (place or {}).get("usage") or {}
        if "cache_read_input_tokens" in usage:  # Anthropic's API
            cached = usage["cache_read_input_tokens"]
            return usage["input_tokens"] + cached, cached, usage["output_tokens"]
        if "input_tokens" in usage:  # responses
            return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


class Recorder(ThreadingHTTPServer):
    """Forwards requests to a server on this machine. `before` is called with each body before it is forwarded."""

    daemon_threads = True

    def __init__(self, port: int, before: Before) -> None:
        super().__init__((LOOPBACK, 0), _Passing)
        self.target = port
        self.before = before
        self.exchanges: list[Exchange] = []
        self.url = f"http://{LOOPBACK}:{self.server_port}"


class _Passing(BaseHTTPRequestHandler):
    server: Recorder

    def _pass_on(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length") or 0))
        body: Any = json.loads(sent) if sent.startswith(b"{") else {}
        self.server.before(body)
        connection = http.client.HTTPConnection(LOOPBACK, self.server.target, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(self.command, self.path, sent or None, dict(self.headers.items()))
            response = connection.getresponse()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in _OF_CONNECTION:
                    self.send_header(name, value)
            self.end_headers()
            answer = bytearray()
            while self.command != "HEAD" and (part := response.read1()):
                answer += part
                with contextlib.suppress(ConnectionError):  # the client has what it needs
                    self.wfile.write(part)
        text = answer.decode(errors="replace")
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.exchanges.append(Exchange(self.command, self.path, body, headers, response.status, text))

    do_GET = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815 (names of the standard library)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def recording(port: int, before: Before) -> Iterator[Recorder]:
    """Run a recorder in front of the server at this port until the block ends."""
    with Recorder(port, before) as recorder:
        thread = threading.Thread(target=recorder.serve_forever)
        thread.start()
        try:
            yield recorder
        finally:
            recorder.shutdown()
            thread.join()

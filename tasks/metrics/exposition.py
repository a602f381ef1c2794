"""Figures as text, and a small HTTP server for them: one thread, one request at a time, `GET /metrics` only."""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from .figures import Figures

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_TIMEOUT_S = 5.0  # until a client has sent its request, and again until it has read the answer
Collect = Callable[[], Figures]


class _Figures(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return ()  # a registry checks names; the table has done that

    def collect(self) -> Iterable[Metric]:
        return self._figures.families()


def text_of(figures: Figures) -> bytes:
    """In Prometheus' text format, with `process_*`: memory, processor time and open files of this process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Figures(figures))
    return generate_latest(registry)


class MetricsServer:
    """Serves what `collect` says from the time it is made. Raises OSError if the port can't be had."""

    def __init__(self, host: str, port: int, collect: Collect) -> None:
        self._server = _Server((host, port), collect)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="cellama-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The port is free afterwards. Waits for a client that is answered just now."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(TCPServer):
    """A client that is slow holds up others for twice CLIENT_TIMEOUT_S, and no more than this thread.

    Not an HTTPServer: that one asks the name service for its own name.
    """

    request_queue_size = 16
    allow_reuse_address = True  # else the port of a worker that has just ended is taken for a minute

    def __init__(self, address: tuple[str, int], collect: Collect) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.collect = collect
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape by %s was not answered", client_address, exc_info=True)


class _UntilDeadline(io.RawIOBase):
    """What a client sends, in CLIENT_TIMEOUT_S for all of it: a byte now and then does not hold a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + CLIENT_TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request was not sent in time")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    """HTTP/1.0: a connection per scrape, so none is held."""

    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection))

    def do_GET(self) -> None:
        self.connection.settimeout(CLIENT_TIMEOUT_S)  # for all that is sent
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "only /metrics is here")
            return
        try:
            body = text_of(self.server.collect())
        except Exception:  # the thread's boundary: the next scrape may be better
            log.exception("metrics: a scrape failed")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "the metrics can't be read; the log has the cause")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "cellama"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape comes every few seconds."""

"""Format metrics as text for Prometheus, and serve them over HTTP on one thread, which answers only `GET /metrics`."""

from __future__ import annotations

import io
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

from cellama.config.logging import event_logger

from .figures import Figures

log = event_logger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_TIMEOUT_S = 5.0  # for a client to send its request, and again to read the response
Collect = Callable[[], Figures]


class _Figures(Collector):
    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        return ()  # skips the registry's check of names, which the table makes unnecessary

    def collect(self) -> Iterable[Metric]:
        return self._figures.families()


def text_of(figures: Figures) -> bytes:
    """Format metrics as text for Prometheus, including the memory, CPU time and open files of this process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Figures(figures))
    return generate_latest(registry)


class MetricsServer:
    """Serves the metrics that `collect` returns at each scrape."""

    def __init__(self, host: str, port: int, collect: Collect) -> None:
        """Start serving. Raises OSError if the port is not available."""
        self._server = _Server((host, port), collect)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="cellama-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the current response, and free the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(TCPServer):
    """Answers one client at a time, so a slow client delays other clients by at most twice CLIENT_TIMEOUT_S.

    This class does not extend HTTPServer, because HTTPServer looks up its own host name.
    """

    request_queue_size = 16
    allow_reuse_address = True  # else the port of a stopped worker is unavailable for a minute

    def __init__(self, address: tuple[str, int], collect: Collect) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.collect = collect
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("metrics request not answered", client=client_address, exc_info=True)


class _DeadlineReader(io.RawIOBase):
    """Reads a request within CLIENT_TIMEOUT_S in total, so that a slow sender can't keep its connection open."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + CLIENT_TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the client did not send its request in time")
        self._connection.settimeout(remaining_s)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    """Answers a scrape with HTTP/1.0, which closes the connection afterwards."""

    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_DeadlineReader(self.connection))

    def do_GET(self) -> None:
        self.connection.settimeout(CLIENT_TIMEOUT_S)  # for the whole response
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "this server only serves /metrics")
            return
        try:
            body = text_of(self.server.collect())
        except Exception:  # the boundary of the thread, because the next scrape may succeed
            log.exception("metrics not collected")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "can't collect the metrics; see the log")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "cellama"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because there is a scrape every few seconds."""

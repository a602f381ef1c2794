"""A collector of traces for tests: what processes export over OTLP/HTTP, kept in memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

QUICK_MS = "50"  # between exports, so that a killed process has exported most of its spans


@dataclass(frozen=True)
class Told:
    """A span as a collector gets it; ids in hex."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[str, ...]  # ids of spans
    is_error: bool
    kind: str = field(default="", compare=False)


class Collector:
    """Listens on a free port of loopback until it is closed."""

    def __init__(self) -> None:
        self._spans: list[Told] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a process that exports its spans to this collector."""
        url = f"http://127.0.0.1:{self._server.server_port}"
        return {"CELLAMA_TRACES": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": QUICK_MS}

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        spans = [s for of in request.resource_spans for scope in of.scope_spans for s in scope.spans]
        self._spans += [_told(span) for span in spans]

    def trace(self, trace_id: str) -> list[Told]:
        """The spans of a trace, by their beginnings."""
        return sorted((s for s in list(self._spans) if s.trace_id == trace_id), key=lambda s: s.start_ns)

    def named(self, name: str) -> list[Told]:
        return [span for span in list(self._spans) if span.name == name]

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _told(span: Any) -> Told:
    return Told(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {attribute.key: _value(attribute.value) for attribute in span.attributes},
        tuple(link.span_id.hex() for link in span.links),
        span.status.code == 2,
        span.SpanKind.Name(span.kind),
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    told = getattr(value, kind)
    return [_value(each) for each in told.values] if kind == "array_value" else told

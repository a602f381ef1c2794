"""Where spans go: OpenTelemetry's SDK, as its own environment variables (OTEL_*) say."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator

from cellama.config import SettingsError

SERVICE = "cellama"  # of processes that OTEL_SERVICE_NAME gives no name
EXPORTERS = "opentelemetry_traces_exporter"  # the group of entry points
PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # of OTLP


class SpanIds(IdGenerator):
    """Another generator's ids, but for spans whose id others know before they see them."""

    def __init__(self, others: IdGenerator) -> None:
        self._others = others
        self._fixed = threading.local()

    @contextlib.contextmanager
    def fixed(self, run: str, job_id: str) -> Iterator[None]:
        """A span that begins in here, on this thread, has the id of this run; without a parent, its job's trace."""
        self._fixed.of = (run_span_id(run), int(hashlib.sha256(job_id.encode()).hexdigest()[:32], 16))
        try:
            yield
        finally:
            del self._fixed.of

    def generate_span_id(self) -> int:
        fixed: tuple[int, int] | None = getattr(self._fixed, "of", None)
        return self._others.generate_span_id() if fixed is None else fixed[0]

    def generate_trace_id(self) -> int:
        fixed: tuple[int, int] | None = getattr(self._fixed, "of", None)
        return self._others.generate_trace_id() if fixed is None else fixed[1]

    def is_trace_id_random(self) -> bool:
        return self._others.is_trace_id_random()


def run_span_id(run: str) -> int:
    """The id of the span of an attempt: a part of the random name that the ledger has of it."""
    return int(run[:16], 16)


def make_provider() -> TracerProvider:
    """One for this process. Raises SettingsError."""
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
    provider = TracerProvider(resource=resource)
    for exporter in _exporters():
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporters() -> Iterator[SpanExporter]:
    """Those of OTEL_TRACES_EXPORTER; OTLP over HTTP if nothing is said."""
    for name in (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        wanted = name.strip()
        if wanted == "otlp":
            wanted = _otlp()
        if wanted != "none":
            found = next(iter(entry_points(group=EXPORTERS, name=wanted)), None)
            if found is None:
                raise SettingsError(
                    f"traces is on, and no package here exports spans as {wanted!r}: `pip install 'cellama[otel]'` "
                    "has otlp over HTTP, or set OTEL_TRACES_EXPORTER to another one, or to none"
                )
            yield found.load()()


def _otlp() -> str:
    said = [os.environ.get(f"OTEL_EXPORTER_OTLP{part}_PROTOCOL") for part in ("_TRACES", "")]
    protocol = next(filter(None, said), "http/protobuf")
    if protocol not in PROTOCOLS:
        raise SettingsError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; known: {', '.join(PROTOCOLS)}")
    return PROTOCOLS[protocol]

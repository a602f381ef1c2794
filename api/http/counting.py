"""What the gateway tells of its requests: counts for Prometheus, spans for OpenTelemetry. Event loop only, but for
reading."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cellama.tasks.metrics.bounded import OTHER, Bounded
from cellama.tasks.metrics.families import Figures
from cellama.tasks.metrics.meter import Meter
from cellama.tasks.traces.gate import tracing

if TYPE_CHECKING:
    from cellama.tasks.traces.tracing import Tracing

METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})
NO_ANSWER = "499"  # the client went away before there was a status
FAILED = "500"
TOKENS = {"prompt": "prompt_tokens", "cached": "cached_tokens", "generated": "completion_tokens"}


class Counts:
    """Of one app, since it was made."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._tenants = Bounded()
        self.num_in_flight = 0

    def answered(self, route: str, method: str, status: str, first_s: float | None, whole_s: float) -> None:
        """A request ended; `first_s` after it began its first byte was sent, if one was."""
        known = method if method in METHODS else OTHER
        self._meter.count("cellama_http_requests_total", route, known, status)
        self._meter.observe("cellama_http_request_seconds", whole_s, route)
        if first_s is not None:
            self._meter.observe("cellama_http_first_byte_seconds", first_s, route)

    def took(self, tenant: str | None, usages: Iterable[Mapping[str, Any]]) -> None:
        """The jobs of a tenant's request read and generated so much."""
        name = self._tenants.of(tenant or "")
        for usage in usages:
            for kind, field in TOKENS.items():
                self._meter.count("cellama_tenant_tokens_total", name, kind, by=usage.get(field) or 0)

    def figures(self) -> Figures:
        """All, as they are now."""
        figures = Figures()
        self._meter.add_to(figures)
        figures.add("cellama_http_requests_in_flight", self.num_in_flight)
        figures.add("cellama_label_values_dropped_total", self._tenants.num_dropped, "tenant")
        return figures


def _paths_of(routes: Sequence[BaseRoute]) -> dict[Any, str]:
    """By endpoint; of aliases the first one."""
    return {route.endpoint: route.path for route in reversed(routes) if isinstance(route, Route)}


class Counting:
    """Counts the requests that go through it. Paths without a route are `other`; aliases are their first path."""

    def __init__(self, app: ASGIApp, counts: Counts, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._counts = counts
        self._paths = _paths_of(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_at, status, first_s = time.monotonic(), NO_ANSWER, None

        async def watch(message: Message) -> None:
            nonlocal status, first_s
            await send(message)
            if message["type"] == "http.response.start":
                status = str(message["status"])
            elif first_s is None and message.get("body"):
                first_s = time.monotonic() - began_at

        self._counts.num_in_flight += 1
        try:
            await self._app(scope, receive, watch)
        except Exception:  # what answers that is outside of all middleware
            status = FAILED if status == NO_ANSWER else status
            raise
        finally:
            self._counts.num_in_flight -= 1
            route = self._paths.get(scope.get("endpoint"), OTHER)
            self._counts.answered(route, scope["method"], status, first_s, time.monotonic() - began_at)


class Traced:
    """A span for each request that may make jobs, below the client's own span if a `traceparent` comes with it. What is
    no POST makes none."""

    def __init__(self, app: ASGIApp, traces: Tracing, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._traces = traces
        self._paths = _paths_of(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]}
        with self._traces.serving("POST", headers) as span:
            span.set_attribute("http.request.method", "POST")

            async def watch(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_attribute("error.type", str(message["status"]))
                await send(message)

            try:
                await self._app(scope, receive, watch)
            finally:
                if (route := self._paths.get(scope.get("endpoint"))) is not None:
                    span.update_name(f"POST {route}")
                    span.set_attribute("http.route", route)


def traced(routes: Sequence[BaseRoute]) -> list[Middleware]:
    """Nothing unless the setting `traces` is on. Raises SettingsError."""
    traces = tracing()
    return [] if traces is None else [Middleware(Traced, traces, routes)]

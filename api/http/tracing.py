"""Spans of requests that may make jobs: below the client's own span, if a `traceparent` comes with the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cellama.tasks.traces.gate import tracing

if TYPE_CHECKING:
    from cellama.tasks.traces.tracing import Tracing


class Traced:
    """Requests that are no POST make no jobs, and have no span."""

    def __init__(self, app: ASGIApp, traces: Tracing, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._traces = traces
        self._paths: dict[Any, str] = {
            route.endpoint: route.path for route in reversed(routes) if isinstance(route, Route)
        }

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

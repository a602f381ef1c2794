"""Middleware that assigns an id and a context to each request, traces POST requests, and counts all requests."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cellama.tasks.metrics.figures import OTHER

from .context import RequestContext, in_time
from .gateway import Gateway

if TYPE_CHECKING:
    from cellama.tasks.traces.tracing import Tracing

REQUEST_ID = "x-request-id"
ANTHROPIC_REQUEST_ID = "request-id"  # the header that Anthropic's clients read
NO_RESPONSE = 499  # the client disconnected before there was a status
FAILED = 500


class RequestMiddleware:
    """Assigns a context and an id to each request, and counts the request.

    The client may choose the id. A POST request also has a span because it may create jobs. If the client sends
    `traceparent`, the span's parent is the client's span. In counts and spans, unknown paths are named `other`, and
    alias paths are named after the endpoint's first path.
    """

    def __init__(
        self, app: ASGIApp, gateway: Gateway, routes: Sequence[BaseRoute], traces: Tracing | None = None
    ) -> None:
        self._app = app
        self._gateway = gateway
        self._paths: dict[Any, str] = {one.endpoint: one.path for one in reversed(routes) if isinstance(one, Route)}
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]}
        sent_id = headers.get(REQUEST_ID, "")
        request_id = sent_id if re.fullmatch(r"[\x21-\x7e]{1,128}", sent_id) else f"req_{uuid.uuid4().hex}"
        context, counts = RequestContext(self._gateway), self._gateway.counts
        scope.setdefault("state", {}).update(request_id=request_id, context=context)
        started_at, status, first_byte_s = time.monotonic(), NO_RESPONSE, None

        async def watch(message: Message) -> None:
            nonlocal status, first_byte_s
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update({REQUEST_ID: request_id, ANTHROPIC_REQUEST_ID: request_id})
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif first_byte_s is None and message.get("body"):
                first_byte_s = time.monotonic() - started_at

        with contextlib.ExitStack() as stack:
            span: Any = None
            if self._traces is not None and scope["method"] == "POST":
                span = stack.enter_context(self._traces.serving("POST", headers))
            counts.num_in_flight += 1
            try:
                await self._app(scope, in_time(receive, self._gateway.settings.gateway_body_timeout_s), watch)
            except Exception:  # it is answered outside of all middleware
                status = FAILED if status == NO_RESPONSE else status
                raise
            finally:
                context.end()
                counts.num_in_flight -= 1
                route = self._paths.get(scope.get("endpoint"))
                duration_s = time.monotonic() - started_at
                counts.count_request(route or OTHER, scope["method"], str(status), first_byte_s, duration_s)
                if span is not None:
                    _describe(span, route, status)


def _describe(span: Any, route: str | None, status: int) -> None:
    span.set_attribute("http.request.method", "POST")
    if status != NO_RESPONSE:
        span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_attribute("error.type", str(status))
    if route is not None:
        span.update_name(f"POST {route}")
        span.set_attribute("http.route", route)

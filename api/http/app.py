"""The gateway's ASGI app, with all routes, a common error format, and an id for each request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route

from cellama.config import Settings, get_settings
from cellama.tasks.contract.errors import JobError
from cellama.tasks.traces.gate import tracing

from . import (
    anthropic,
    batches,
    completions,
    console,
    files,
    infill,
    messages,
    metrics,
    models,
    ollama,
    responses,
    tokens,
    vectors,
)
from .auth import Access, NoKeys
from .errors import ApiError, of_job
from .gateway import Gateway
from .keys.access import RATE_HEADER_NAMES
from .middleware import ANTHROPIC_REQUEST_ID, REQUEST_ID, RequestMiddleware
from .openapi import ROUTES as OPENAPI_ROUTES
from .paths import PathMiddleware
from .webhooks import webhooks_of

ENDPOINT_MODULES = (completions, infill, responses, messages, vectors, tokens, models, metrics, files, batches)
EXPOSED_HEADERS = (
    REQUEST_ID,
    ANTHROPIC_REQUEST_ID,
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *RATE_HEADER_NAMES,
)
_ENDPOINTS = "docs/reference/gateway.md"
API_ROUTES: Sequence[BaseRoute] = [*(route for module in ENDPOINT_MODULES for route in module.ROUTES), *OPENAPI_ROUTES]
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected before the response


def create_app(settings: Settings | None = None, *, access: Access | None = None) -> Starlette:
    """Return the gateway as an ASGI app, which can be served or mounted into another app.

    `settings` defaults to the process's settings. Without `access`, all requests are accepted and treated as requests
    from the same caller. Raises SettingsError.

    The app's lifespan resumes batches, delivers webhooks, and closes connections on shutdown. Servers do not run the
    lifespan of a mounted app, so the outer app must run the gateway's lifespan: `async with
    app.router.lifespan_context(app)`.
    """
    settings, access = settings or get_settings(), access or NoKeys()
    gateway, runner = Gateway(settings, access), batches.BatchRunner(settings)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        webhooks = webhooks_of(settings)
        runner.start()
        webhooks.start()
        try:
            yield
        finally:
            await runner.close()
            await webhooks.close()
            await gateway.close()

    handlers: dict[Any, Any] = {
        ApiError: _api_error,
        JobError: _job_error,
        console.SignInRequired: console.sign_in_response,
        HTTPException: _http_error,
        ClientDisconnect: _client_closed,
        Exception: _internal_error,
    }
    routes = [*API_ROUTES, *ollama.ROUTES]
    if console.is_served(settings, access):
        routes += console.ROUTES
    app = Starlette(
        routes=routes,
        middleware=_middleware(settings, gateway, routes),
        exception_handlers=handlers,
        lifespan=lifespan,
    )
    app.state.gateway = gateway
    app.state.batches = runner
    return app


def _middleware(settings: Settings, gateway: Gateway, routes: Sequence[BaseRoute]) -> list[Middleware]:
    """Return the middleware, outermost first. Raises SettingsError if the trace exporter is not available."""
    return [
        Middleware(PathMiddleware, routes),
        Middleware(RequestMiddleware, gateway, routes, tracing()),
        *_cors(settings),
    ]


def _cors(settings: Settings) -> list[Middleware]:
    """Return the middleware that allows web pages from `gateway_cors_origins` to send requests.

    `gateway_cors_origins` is empty by default.

    Keys are sent in a header, never in a cookie, so a page can use only keys that it already has.
    """
    if not settings.gateway_cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.gateway_cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    ]


async def _api_error(request: Request, error: ApiError) -> Response:
    if console.is_console_page(request):
        return console.error_page(request, error)
    if ollama.is_ollama_path(request):
        return ollama.error_response(error)
    if anthropic.speaks_anthropic(request):
        return anthropic.error_response(request, error)
    return JSONResponse(error.envelope, error.status, error.headers)


async def _job_error(request: Request, error: JobError) -> Response:
    return await _api_error(request, of_job(error))


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Convert router errors, such as errors for unknown paths and methods, into API errors."""
    path = f"{request.method} {request.url.path}"
    remedy = f"{_ENDPOINTS} lists the endpoints"
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if console.is_console_page(request):
        remedy = "open the overview"
    elif error.status_code == 405:
        allowed = _allowed(request)
        remedy = f"use {allowed}"
        headers["allow"] = allowed
    message = f"{path}: {error.detail}; {remedy}"
    return await _api_error(request, ApiError(error.status_code, message, headers=headers))


def _allowed(request: Request) -> str:
    """Return the methods of all routes that match the request's path."""
    matching = (route for route in request.app.routes if isinstance(route, Route))
    methods = (route.methods or () for route in matching if route.matches(request.scope)[0] != Match.NONE)
    return ", ".join(sorted(set(chain.from_iterable(methods))))


async def _internal_error(request: Request, _: Exception) -> Response:
    return await _api_error(request, ApiError(500, "internal error; the log of the gateway has the traceback"))


async def _client_closed(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_CLOSED)

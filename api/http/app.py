"""The app: the routes of all rooms, errors in one envelope, an id for each request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from cellama.config import Settings, get_settings
from cellama.tasks.contract.errors import JobError
from cellama.tasks.traces.gate import tracing

from . import batches, completions, files, messages, metrics, models, responses, tokens, vectors
from .auth import Access, NoKeys
from .errors import ApiError, of_job
from .gateway import Gateway
from .keys.access import RATE_HEADER_NAMES
from .middleware import REQUEST_ID, RequestMiddleware
from .webhooks import webhooks_of

ROOMS = (completions, responses, messages, vectors, tokens, models, metrics, files, batches)
READ_BY_CLIENTS = (REQUEST_ID, "request-id", "retry-after", "retry-after-ms", "x-should-retry", *RATE_HEADER_NAMES)
GONE = 499  # nginx's: the client did not wait for the answer


def create_app(settings: Settings | None = None, *, access: Access | None = None) -> Starlette:
    """The gateway as an ASGI app, to be run, or mounted into another one. `settings` are those of the process unless
    given; without `access` it lets in whoever reaches it, as one caller. Raises SettingsError.

    Its lifespan goes on with batches, delivers webhooks, and closes connections at the end. A server does not run that
    of an app that is mounted: the lifespan of the other app must, by `async with app.router.lifespan_context(app)`.
    """
    settings = settings or get_settings()
    gateway, runner = Gateway(settings, access or NoKeys()), batches.Runner(settings)

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
        HTTPException: _http_error,
        ClientDisconnect: _gone,
        Exception: _internal_error,
    }
    routes = [route for room in ROOMS for route in room.ROUTES]
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
    """The outermost first. Raises SettingsError for traces that can't be written."""
    return [Middleware(RequestMiddleware, gateway, routes, tracing()), *_cors(settings)]


def _cors(settings: Settings) -> list[Middleware]:
    """Which pages in browsers may ask; none unless a setting says so. A key travels in a header, never as a cookie, so
    no page gets more than what it knows itself."""
    if not settings.gateway_cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.gateway_cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=READ_BY_CLIENTS,
        )
    ]


async def _api_error(_: Request, error: ApiError) -> Response:
    return JSONResponse(error.envelope, error.status, error.headers)


async def _job_error(request: Request, error: JobError) -> Response:
    return await _api_error(request, of_job(error))


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Of the router: no such path, or another method."""
    message = f"{request.method} {request.url.path}: {error.detail}; docs/how-to/gateway.md lists the endpoints"
    return await _api_error(request, ApiError(error.status_code, message, headers=error.headers))


async def _internal_error(request: Request, _: Exception) -> Response:
    return await _api_error(request, ApiError(500, "an error that was not foreseen; the log has its trace"))


async def _gone(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=GONE)

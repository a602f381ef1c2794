"""The endpoints that list and describe models in Ollama's format."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.http.context import caller_of
from cellama.api.http.gateway import gateway_of
from cellama.api.ollama.answers import VERSION, listed, running, shown

from .reading import find_named, read_body


async def tags(request: Request) -> Response:
    """Handle `GET /api/tags`."""
    caller = await caller_of(request)
    return JSONResponse({"models": list(map(listed, await gateway_of(request).listed_models(caller)))})


async def ps(request: Request) -> Response:
    """Handle `GET /api/ps`.

    The response lists all models that accept jobs, because all of these models are in memory.
    """
    caller = await caller_of(request)
    return JSONResponse({"models": list(map(running, await gateway_of(request).models(caller)))})


async def show(request: Request) -> Response:
    """Handle `POST /api/show`."""
    parsed = await read_body(request)
    name = parsed.body.get("model") or parsed.body.get("name")
    return JSONResponse(shown(await find_named(parsed.gateway, parsed.caller, name)))


async def version(request: Request) -> Response:
    """Handle `GET /api/version`."""
    await caller_of(request)
    return JSONResponse({"version": VERSION})


ROUTES = (
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/ps", ps, methods=["GET"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/version", version, methods=["GET"]),
)

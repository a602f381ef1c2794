"""The endpoint that serves the OpenAPI document.

The endpoint doesn't require an API key, because the document contains no secrets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cellama.api.http.background import BODIES, in_thread

from .document import gateway_document

OPENAPI = "/openapi.json"


async def openapi(request: Request) -> Response:
    """Handle `GET /openapi.json`.

    Creating the document takes a moment, so the document is created only once, in a separate thread.
    """
    state, server = request.app.state, request.scope.get("root_path") or "/"
    if not hasattr(state, "openapi"):
        state.openapi = {}
    if server not in state.openapi:
        state.openapi[server] = await in_thread(BODIES, document_text, request.app.routes, server)
    return Response(state.openapi[server], media_type="application/json")


def document_text(routes: Iterable[BaseRoute], server: str = "/") -> str:
    """Return the document as JSON."""
    return json.dumps(gateway_document(routes, server), indent=1)


ROUTES = (
    Route(OPENAPI, openapi, methods=["GET"]),
    Route("/v1" + OPENAPI, openapi, methods=["GET"]),
)

"""Ollama's endpoints that change models.

Requests to these endpoints are rejected, because models are managed on workers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cellama.api.http.context import caller_of
from cellama.api.http.errors import ApiError

_REMEDIES = {  # path → methods, and the command to run instead
    "/api/pull": (["POST"], "load the model on the workers with `cellama models load`"),
    "/api/push": (["POST"], "copy the model's file to the workers, and load it with `cellama models load`"),
    "/api/create": (
        ["POST"],
        "set the model's parameters in cellama.toml, or load it with `cellama models load --set NAME=VALUE`",
    ),
    "/api/copy": (["POST"], "load the model under the new name with `cellama models load`"),
    "/api/delete": (["DELETE"], "unload the model from the workers with `cellama models unload`"),
    "/api/blobs/{digest}": (["POST", "HEAD"], "copy the file to the workers, and load it with `cellama models load`"),
}


def _rejecting(path: str, remedy: str) -> Callable[[Request], Awaitable[Response]]:
    """Return a separate endpoint function for each path, because requests are counted per endpoint."""

    async def reject(request: Request) -> Response:
        await caller_of(request)
        raise ApiError(400, f"{path} is not supported; {remedy}", code="not_supported")

    return reject


ROUTES = tuple(Route(path, _rejecting(path, remedy), methods=methods) for path, (methods, remedy) in _REMEDIES.items())

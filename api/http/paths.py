"""Find the endpoint for a request whose client uses a slightly wrong base URL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

VERSION = "/v1"
_VERSIONS = re.compile(r"(?:/+v1(?![^/]))*/*")  # at the start of a path, any number of times
_CONSOLE = "/console"  # its router handles slashes by itself


def canonical_path(path: str, names: Iterable[str]) -> str:
    """Return the path of the endpoint that the client intended to call.

    `names` contains the first segments of paths after `/v1`. Such paths are also found if `/v1` is missing or repeated.
    Trailing slashes and repeated leading slashes are ignored.
    """
    if path == _CONSOLE or path.startswith(f"{_CONSOLE}/"):
        return path
    start = _VERSIONS.match(path)
    rest = path[start.end() if start else 0 :].rstrip("/")
    is_versioned = start is not None and "v1" in start[0]
    if is_versioned or rest.partition("/")[0] in names:
        return f"{VERSION}/{rest}".rstrip("/")
    return f"/{rest}"


def path_in_app(scope: Scope) -> str:
    """Return a request's path without the app's mount path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class PathMiddleware:
    """Replaces the path of each request with the path of its endpoint (see `canonical_path`)."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        paths = [route.path for route in routes if isinstance(route, Route)]
        self._names = {path.split("/")[2] for path in paths if path.startswith(f"{VERSION}/")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = canonical_path(path_in_app(scope), self._names)
            scope["path"] = scope.get("root_path", "") + path  # in place, so that all middleware sees the same path
        await self._app(scope, receive, send)

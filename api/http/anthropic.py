"""Recognise requests from Anthropic clients, and report errors in Anthropic's format."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cellama.api.anthropic.answers import error_object, status_for_clients
from cellama.api.anthropic.parameters import MESSAGES

from .errors import ApiError
from .paths import path_in_app

MODELS = "/v1/models"  # the only path that both APIs have
VERSION, KEY = "anthropic-version", "x-api-key"


def speaks_anthropic(request: Request) -> bool:
    """Return whether the client expects answers in Anthropic's format.

    Anthropic clients send an API version with each request, or request a path below `/v1/messages`. For paths below
    `/v1/models`, a key in `x-api-key` also identifies an Anthropic client.
    """
    path = path_in_app(request.scope)
    if VERSION in request.headers or path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return True
    return KEY in request.headers and (path == MODELS or path.startswith(f"{MODELS}/"))


def error_response(request: Request, error: ApiError) -> Response:
    """Return the HTTP response for an error."""
    request_id = getattr(request.state, "request_id", "")
    body = error_object(error.status, error.message, request_id, error.code)
    return JSONResponse(body, status_for_clients(error.status, error.code), error.headers)

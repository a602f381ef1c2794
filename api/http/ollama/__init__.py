"""Ollama's endpoints for chats, completions, embeddings and model lists (docs/how-to/ollama.md).

`reading.py` parses bodies and finds models by their Ollama names. All errors below `/api/` have Ollama's format.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cellama.api.http.errors import ApiError

from . import embedding, generating, listing, managing

ROUTES = (*generating.ROUTES, *embedding.ROUTES, *listing.ROUTES, *managing.ROUTES)

__all__ = ["ROUTES", "error_response", "is_ollama_path"]


def is_ollama_path(request: Request) -> bool:
    """Return whether a request's path belongs to Ollama's API, in which case errors use Ollama's format."""
    return request.url.path.startswith(f"{request.scope.get('root_path', '')}/api/")


def error_response(error: ApiError) -> Response:
    return JSONResponse({"error": error.message}, error.status, error.headers)

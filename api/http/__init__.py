"""The gateway, an HTTP server with OpenAI, Anthropic and Ollama endpoints (docs/adr/016-gateway.md).

This package may import `client` and the packages that `client` imports, but no worker or engine code. Each package in
this directory is a group of endpoints that must not import other groups.
"""

from .app import create_app
from .auth import Access, Admission, Caller
from .errors import ApiError

__all__ = ["Access", "Admission", "ApiError", "Caller", "create_app"]

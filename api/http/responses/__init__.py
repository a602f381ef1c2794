"""The endpoints of /v1/responses, which create, stream, retrieve and cancel responses (docs/adr/020-responses.md).

This package may use the modules of `http`, and `openai`. Response state is kept only in Redis, so any gateway can serve
responses.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

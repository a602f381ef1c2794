"""The endpoints /v1/responses: create, stream, retrieve from any gateway, cancel (docs/adr/020-responses.md).

This package may use the modules of `http`, and `openai`. The state of responses is in Redis only.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

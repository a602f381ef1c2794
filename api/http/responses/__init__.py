"""The endpoints of /v1/responses, which create, stream, retrieve and cancel responses (docs/adr/020-responses.md).

This package may import `openai` and the modules in `http`. Response state is stored only in Redis, so any gateway can
serve any response.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

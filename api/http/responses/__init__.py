"""/v1/responses: created, streamed, read again from anywhere, cancelled (docs/adr/020-responses.md).

May use: the modules of `http`, `openai`. Nothing of a response is kept in here.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

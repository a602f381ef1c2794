"""POST /v1/chat/completions, /v1/completions: streamed or not.

May use: the modules of `http`, `openai`.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

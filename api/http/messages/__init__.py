"""POST /v1/messages, streamed or not, and /v1/messages/count_tokens: as Anthropic's clients speak.

May use: the modules of `http`, `anthropic`, `openai`.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

"""GET /v1/models, /health, /ready.

May use: the modules of `http`.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

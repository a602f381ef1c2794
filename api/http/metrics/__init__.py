"""GET /metrics: what the gateway counts of its own requests.

May use: the modules of `http`.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

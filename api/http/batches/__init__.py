"""Batches of the gateway: bulk runs under a lease, driven inside the gateway's process (docs/adr/019-batches.md).

May use: the room `files` and the modules of the gateway below the groups of endpoints; `api.batch`.
"""

from .endpoints import ROUTES
from .runner import Runner

__all__ = ["ROUTES", "Runner"]

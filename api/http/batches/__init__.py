"""Batches, which are bulk runs driven by the gateway that holds their lease (docs/adr/019-batches.md).

This package may import the `files` package, the gateway modules shared by all endpoints, and `api.batch`.
"""

from .endpoints import ROUTES
from .runner import BatchRunner

__all__ = ["ROUTES", "BatchRunner"]

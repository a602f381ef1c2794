"""Batches, which are bulk runs that a gateway drives while it holds a lease (docs/adr/019-batches.md).

This package may use the package `files`, the modules of the gateway that all endpoints use, and `api.batch`.
"""

from .endpoints import ROUTES
from .runner import BatchRunner

__all__ = ["ROUTES", "BatchRunner"]

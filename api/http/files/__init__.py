"""The gateway's files, which clients upload and batches read and write (docs/adr/019-batches.md).

This package may import the gateway modules shared by all endpoints. The `batches` package imports this package.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

"""The gateway's files, which clients upload and batches read and write (docs/adr/019-batches.md).

This package may use the modules of the gateway that all endpoints use. The package `batches` uses this package.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

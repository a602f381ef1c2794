"""Files of the gateway: uploads, contents and records, which batches read and write (docs/adr/019-batches.md).

This package may use the modules of the gateway that all endpoints use. `batches` uses this package.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

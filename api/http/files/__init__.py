"""Files of the gateway: uploads, contents, records; what batches read and write (docs/adr/019-batches.md).

May use: the modules of the gateway below the groups of endpoints. `batches` uses this room.
"""

from .endpoints import ROUTES

__all__ = ["ROUTES"]

"""Webhooks without HTTP: which endpoints there are, how a call is signed, and how an event is announced.

`announcement` and `heed` are for whoever ends a thing; the gateway delivers (`http/webhooks`), `cellama webhooks`
registers.
May use: the connections and the contract of `tasks`.
"""

from .announcing import BATCH_ENDS, announcement, heed

__all__ = ["BATCH_ENDS", "announcement", "heed"]

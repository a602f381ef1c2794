"""Webhooks without HTTP: which endpoints there are, how a call is signed, and the one way to announce an event.

`announce` is for whoever ends a thing; the gateway delivers (`http/webhooks`), `cellama webhooks` registers.
May use: the connections and the contract of `tasks`.
"""

from .announcing import announce, announcement, heed

__all__ = ["announce", "announcement", "heed"]

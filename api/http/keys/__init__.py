"""Authenticate requests by API key, and apply each key's rights and limits.

This package may import the gateway modules `auth` and `errors`, `api.keys`, and the connections and contract of
`tasks`.
"""

from .access import key_access

__all__ = ["key_access"]

"""Authenticate requests by API key, and apply each key's rights and limits.

This package may use `auth` and `errors` of the gateway, `api.keys`, and the connections and the contract of `tasks`.
"""

from .access import key_access

__all__ = ["key_access"]

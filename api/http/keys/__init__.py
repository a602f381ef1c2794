"""The gateway's door where there are API keys: who a request comes from, what it may ask for, how much of it.

May use: `callers` and `errors` of the gateway, the `keys` that there are, the connections and the contract of `tasks`.
"""

from .access import key_access

__all__ = ["key_access"]

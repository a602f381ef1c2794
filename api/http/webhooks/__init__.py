"""Webhooks: what was announced goes to the endpoints of its tenant, at least once, tried again for days.

May use: the `webhooks` that there are, the settings, the connections and the contract of `tasks`. `app` runs it.
"""

from .delivering import Webhooks, webhooks_of

__all__ = ["Webhooks", "webhooks_of"]

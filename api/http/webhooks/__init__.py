"""Delivery of webhooks: each event goes to the endpoints of its tenant at least once, with retries for three days.

This package may use `api.webhooks`, the settings, and the connections and the contract of `tasks`. `app` starts it.
"""

from .delivering import Webhooks, webhooks_of

__all__ = ["Webhooks", "webhooks_of"]

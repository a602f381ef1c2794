"""Deliver webhooks.

Each event is sent to all endpoints of its tenant, and failed attempts are retried for three days. This package may
import `api.webhooks`, the settings, and the connections and contract of `tasks`. `app` starts the delivery loop.
"""

from .delivering import Webhooks, webhooks_of

__all__ = ["Webhooks", "webhooks_of"]

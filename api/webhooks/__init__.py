"""Register webhook endpoints, sign requests to them, and announce events, without sending any HTTP requests.

The code that ends a batch or a response calls `announcement` or `notify_on_end`. The gateway delivers the events
(`http/webhooks`). `cellama webhooks` registers endpoints.
This package may import the connections and contract of `tasks`.
"""

from .announcing import BATCH_ENDS, announcement, notify_on_end

__all__ = ["BATCH_ENDS", "announcement", "notify_on_end"]

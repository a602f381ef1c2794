"""The gateway: HTTP as OpenAI's clients speak it, in front of the queue (docs/adr/016-gateway.md).

May use: `client` and what that may use; nothing of workers and engines. A folder in here is a group of endpoints, and
knows nothing of the others.
"""

from .app import create_app
from .auth import Access, Admission, Caller
from .errors import ApiError

__all__ = ["Access", "Admission", "ApiError", "Caller", "create_app"]

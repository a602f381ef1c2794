"""The console, whose pages show queues, jobs, chats, bulk runs and keys in a browser (docs/how-to/console.md).

`session.py` identifies the visitor, `rendering.py` renders templates, and each of the other modules serves a group of
pages. Pages don't use inline scripts and styles because the Content-Security-Policy forbids them.
"""

from __future__ import annotations

from cellama.api.http.auth import Access
from cellama.api.http.keys.access import KeyAccess
from cellama.config import Settings

from . import chat, jobs, keys, overview, runs, shares, sign_in
from .rendering import STATIC_ROUTE, error_page, is_console_page
from .session import SignInRequired, sign_in_response

PAGE_MODULES = (overview, jobs, chat, runs, shares, keys, sign_in)
ROUTES = (*(route for module in PAGE_MODULES for route in module.ROUTES), STATIC_ROUTE)

__all__ = ["ROUTES", "SignInRequired", "error_page", "is_console_page", "is_served", "sign_in_response"]


def is_served(settings: Settings, access: Access) -> bool:
    """Return whether a gateway with this access control serves the console.

    By default, the console is served if the gateway checks API keys, or if only this machine can reach the gateway.
    """
    if settings.gateway_console == "auto":
        return isinstance(access, KeyAccess)  # without keys, it admits requests from this machine only
    return settings.gateway_console == "on"

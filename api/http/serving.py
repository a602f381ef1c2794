"""The gateway in a process of its own: uvicorn around the app."""

from __future__ import annotations

import signal

import uvicorn

from cellama.config import Settings
from cellama.config.logging import configure_logging

from .app import create_app
from .callers import Access
from .keys import key_access

BACKLOG = 2048  # connections that wait to be accepted


def serve(settings: Settings, host: str, port: int, access: Access | None = None) -> None:
    """Serves until SIGTERM or SIGINT; then requests may end for `drain_s`, and those that have not are cancelled.

    Without an `access` it is `key_access`, which raises SettingsError for an address that others reach without keys.
    """
    access = access or key_access(settings, host)
    configure_logging(settings.log_level, settings.log_format)
    config = uvicorn.Config(
        create_app(settings, access=access),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=settings.drain_s,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn hands it on when it has ended: that is a good end
    uvicorn.Server(config).run()

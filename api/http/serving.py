"""The gateway in a process of its own: uvicorn around the app."""

from __future__ import annotations

import signal

import uvicorn

from cellama.config import Settings
from cellama.config.logging import configure_logging

from .app import create_app
from .callers import Access, LoopbackOnly, is_loopback

BACKLOG = 2048  # connections that wait to be accepted


class NeedsKeys(Exception):
    """Without keys the gateway serves this machine only."""


def serve(settings: Settings, host: str, port: int, access: Access | None = None) -> None:
    """Serves until SIGTERM or SIGINT; then requests may end for `drain_s`, and those that have not are cancelled.

    Raises NeedsKeys for an address that others can reach, if there is no `access`.
    """
    if access is None and not is_loopback(host):
        raise NeedsKeys(
            f"{host} can be reached by others, and there are no keys: every one of them could use your models; "
            "listen on 127.0.0.1, or make a key"
        )
    configure_logging(settings.log_level)
    config = uvicorn.Config(
        create_app(settings, access=access or LoopbackOnly()),
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

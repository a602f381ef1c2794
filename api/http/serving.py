"""Serve the gateway with uvicorn in a separate process."""

from __future__ import annotations

import asyncio
import gc
import signal

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from cellama.config import Settings
from cellama.config.logging import configure_logging

from .app import create_app
from .auth import Access
from .keys import key_access


def protocol_of(head_timeout_s: float) -> type[asyncio.Protocol]:
    """Return a uvicorn protocol class with a timeout for each request's head.

    A connection is closed if the head of its first request takes longer than `head_timeout_s` to arrive. For later
    requests, the timeout starts at the first byte of the head. If a request is answered early, the same time limit
    applies to the rest of the request's body.
    """

    class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _closing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            self._expect_head()
            super().data_received(data)
            if self._has_request:
                self._stop_waiting()

        def connection_lost(self, error: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(error)

        @property
        def _has_request(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _expect_head(self) -> None:
            if self._closing is None and not self._has_request:
                self._closing = self.loop.call_later(head_timeout_s, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._closing is not None:
                self._closing.cancel()
                self._closing = None

    return TimedProtocol


def serve(settings: Settings, host: str, port: int, access: Access | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Running requests then have `drain_s` seconds to finish before they are cancelled.

    `access` defaults to `key_access`, which raises SettingsError if other machines can reach the address without
    keys.
    """
    access = access or key_access(settings, host)
    configure_logging(settings.log_level, settings.log_format)
    config = uvicorn.Config(
        create_app(settings, access=access),
        host=host,
        port=port,
        http=protocol_of(settings.gateway_head_timeout_s),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=settings.drain_s,
    )
    # Imported modules never become garbage. Without freezing, each full collection would stop all streams for 0.1 s.
    gc.collect()
    gc.freeze()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises it again after its shutdown, which is a normal exit
    uvicorn.Server(config).run()

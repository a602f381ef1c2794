"""Published messages for one reader that it has not read yet, up to a limit."""

from __future__ import annotations

import asyncio
import enum

MOST_BYTES = 32 << 10  # per reader; a reader that lags further behind reads the journal instead


class Sign(enum.Enum):
    """What a reader gets instead of messages."""

    SUBSCRIBED = "no later message is missing; older ones are in the journal"
    LAGGED = "messages were dropped: they are in the journal"
    SILENCE = "no message came in time"


class Mailbox:
    """Messages of a channel for one reader, in the order in which they were published. For one event loop.

    It keeps no messages before it is subscribed, nor from a drop until the reader has been notified of it.
    """

    __slots__ = ("_deadline", "_failure", "_loop", "_messages", "_num_bytes", "_sign", "_timer", "_waiter", "channel")

    def __init__(self, channel: bytes) -> None:
        self.channel = channel
        self._messages: list[bytes] = []
        self._num_bytes = 0
        self._sign: Sign | None = None  # what the reader gets first
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0  # of the present wait, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None  # outlives waits: one for each would cost the most

    def put(self, message: bytes) -> None:
        """Keep a message, or drop all of them if they are too many: the journal has them."""
        if self._sign is Sign.LAGGED:
            return
        self._num_bytes += len(message)
        if self._num_bytes > MOST_BYTES:
            self._drop()
            self._sign = self._sign or Sign.LAGGED
        else:
            self._messages.append(message)
        self._wake()

    def subscribed(self) -> None:
        """Note that the channel is subscribed, for the first time or again."""
        self._drop()
        self._sign = Sign.SUBSCRIBED
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raise the error in the reader, because no more messages will come."""
        self._failure = error
        self._wake()

    async def get(self, timeout_s: float) -> list[bytes] | Sign:
        """The messages that are there, or come first; or a sign. Raises what it was failed with."""
        if not self._has_news():
            await self._wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        if self._sign is not None:
            sign, self._sign = self._sign, None
            return sign
        messages = self._messages
        self._drop()
        return messages or Sign.SILENCE

    def _has_news(self) -> bool:
        return bool(self._messages) or self._sign is not None or self._failure is not None

    async def _wait(self, timeout_s: float) -> None:
        self._deadline = self._loop.time() + timeout_s
        if self._timer is None or self._timer.when() > self._deadline:
            self._set_timer()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _set_timer(self) -> None:
        self.stop()
        self._timer = self._loop.call_at(self._deadline, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._waiter is not None:
            if self._loop.time() < self._deadline:
                self._set_timer()
            else:
                self._wake()

    def stop(self) -> None:
        """Its reader has gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self) -> None:
        self._messages, self._num_bytes = [], 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

"""The channels of all readers of an event loop, over one connection that exists while there are readers."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError, RedisError

from .mailbox import Mailbox
from .wire import Wire

log = logging.getLogger(__name__)

TICK_S = 5.0  # between two pings, which find a dead connection earlier than TCP does
MOST_SILENT_TICKS = 2  # without a reply: the connection is dead; one such tick may only mean that the loop was busy
PAGE = 500  # channels per command, because Redis serves no other client meanwhile


class Subscriptions:
    """The subscriptions of the readers of one event loop. It is not safe for several threads.

    The connection is made when the first reader joins. When it is lost, it is made again at once, and every reader gets
    `SUBSCRIBED` again. If that fails, every reader gets the error, and the next reader that joins tries again.
    """

    def __init__(self, connect: Callable[[], Awaitable[Wire]]) -> None:
        self._connect = connect
        self._boxes: dict[bytes, list[Mailbox]] = {}
        self._task: asyncio.Task[None] | None = None
        self._wire: Wire | None = None
        # Of this connection:
        self._sent: set[bytes] = set()  # channels as they will be once Redis has seen all commands
        self._unconfirmed: Counter[bytes] = Counter()  # subscriptions that Redis has not confirmed
        self._changed: set[bytes] = set()  # channels of readers that have come or gone since the last command
        self._silent_ticks = 0

    @contextmanager
    def mailbox(self, channel: str) -> Iterator[Mailbox]:
        """Yield a mailbox for the messages of the channel, until the end of the block."""
        box = Mailbox(channel.encode())
        self._boxes.setdefault(box.channel, []).append(box)
        if self._task is None:
            # of no reader: neither what its context says nor its end is this task's
            self._task = asyncio.create_task(self._serve(), context=contextvars.Context())
        elif self._is_confirmed(box.channel):
            box.subscribed()
        else:
            self._change(box.channel)
        try:
            yield box
        finally:
            self._leave(box)

    async def close(self) -> None:
        """End the connection. Readers that are left get a RuntimeError."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])
            if self._task is task:  # it had not begun, so nothing of it has run
                self._end(_closed())

    def _leave(self, box: Mailbox) -> None:
        box.stop()
        boxes = self._boxes.get(box.channel, [])
        if box in boxes:
            boxes.remove(box)
            if not boxes:
                del self._boxes[box.channel]
                self._change(box.channel)

    def _is_confirmed(self, channel: bytes) -> bool:
        return channel in self._sent and not self._unconfirmed[channel]

    # Commands. Those of one turn of the loop are sent together.

    def _change(self, channel: bytes) -> None:
        if self._wire is not None:
            if not self._changed:
                asyncio.get_running_loop().call_soon(self._flush)
            self._changed.add(channel)

    def _flush(self) -> None:
        changed, self._changed = self._changed, set()
        if self._wire is None:
            return
        come = [channel for channel in changed if channel in self._boxes and channel not in self._sent]
        gone = [channel for channel in changed if channel not in self._boxes and channel in self._sent]
        self._send(self._wire, b"UNSUBSCRIBE", gone)
        self._send(self._wire, b"SUBSCRIBE", come)
        self._sent.difference_update(gone)
        self._sent.update(come)
        self._unconfirmed.update(come)

    @staticmethod
    def _send(wire: Wire, command: bytes, channels: list[bytes]) -> None:
        for start in range(0, len(channels), PAGE):
            wire.send([command, *channels[start : start + PAGE]])

    # The task

    async def _serve(self) -> None:
        """Serve until no reader is left, the task is cancelled, or Redis refuses the connection."""
        failure: Exception = _closed()
        try:
            while self._boxes:
                await self._serve_connection(await self._connect())
        except RedisError as error:
            failure = error
        except Exception as error:
            log.error("the subscriptions of all streams have failed", exc_info=True)
            failure = error
        finally:
            self._end(failure)

    def _end(self, failure: Exception) -> None:
        """Fail the readers that are left. The next reader starts a new task."""
        self._task = None
        boxes, self._boxes = self._boxes, {}
        for box in chain.from_iterable(boxes.values()):
            box.fail(failure)

    async def _serve_connection(self, wire: Wire) -> None:
        """Serve until the connection is lost. Raises RedisError if Redis refuses a command."""
        has_served = False
        self._wire, self._changed = wire, set(self._boxes)
        ticking = asyncio.create_task(self._tick(wire))
        try:
            self._flush()
            while True:
                replies = await wire.replies()
                self._silent_ticks, has_served = 0, True
                for reply in replies:
                    self._take(reply)
        except RedisConnectionError as error:
            if not has_served:
                raise
            if self._boxes:  # else it was ended because no reader needs it
                log.info("the connection of the subscriptions has ended: %s", error)
        finally:
            ticking.cancel()
            self._wire, self._sent, self._unconfirmed, self._silent_ticks = None, set(), Counter(), 0
            await wire.close()

    async def _tick(self, wire: Wire) -> None:
        """End a connection that no reader needs, or that is dead although nothing has closed it."""
        await asyncio.sleep(TICK_S)
        while self._boxes and self._silent_ticks < MOST_SILENT_TICKS:
            self._silent_ticks += 1
            wire.send([b"PING"])
            await asyncio.sleep(TICK_S)
        wire.abort()

    def _take(self, reply: Any) -> None:
        if not isinstance(reply, list):  # a pong
            return
        if reply[0] == b"message":
            for box in self._boxes.get(reply[1], ()):
                box.put(reply[2])
        elif reply[0] == b"subscribe":
            self._confirm(reply[1])

    def _confirm(self, channel: bytes) -> None:
        self._unconfirmed[channel] -= 1
        if self._unconfirmed[channel] <= 0:
            del self._unconfirmed[channel]
            for box in self._boxes.get(channel, ()):
                box.subscribed()


def _closed() -> RuntimeError:
    return RuntimeError("the client was closed while a stream was read")

"""Subscribe to the channels of all readers in an event loop over one connection, which exists while there are readers.

A `Mailbox` holds the unread messages of one reader, a `Wire` is the connection to Redis, and `Subscriptions` delivers
messages from the wire to the mailboxes.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import hiredis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError, RedisError, ResponseError

from cellama.config.logging import event_logger
from cellama.tasks.connection.kombu_internals import streams_of, take_connection
from cellama.tasks.connection.redis_errors import refusal_of

log = event_logger(__name__)

MAX_UNREAD_BYTES = 32 << 10  # per reader; a reader that lags further behind reads the journal instead
READ_BYTES = 1 << 16  # per read of the socket, which holds several hundred events
TICK_S = 5.0  # seconds between two pings, which detect a dead connection earlier than TCP does
MAX_SILENT_TICKS = 2  # without a reply, before a connection counts as dead; a busy loop may explain a single one
PAGE = 500  # channels per command, during which Redis serves no other client
_NOTHING = object()


class Signal(enum.Enum):
    """A signal that a reader can receive instead of messages."""

    SUBSCRIBED = "subscribed: no later message is missing, and older messages are in the journal"
    LAGGED = "messages were dropped, and are in the journal"
    SILENCE = "no message arrived before the timeout"


class Mailbox:
    """A channel's unread messages for one reader in an event loop, in the order in which they were published.

    Messages are discarded until the channel is subscribed, and after an overflow until the reader has been notified.
    """

    __slots__ = ("_deadline", "_failure", "_loop", "_messages", "_num_bytes", "_signal", "_timer", "_waiter", "channel")

    def __init__(self, channel: bytes) -> None:
        self.channel = channel
        self._messages: list[bytes] = []
        self._num_bytes = 0
        self._signal: Signal | None = None  # delivered before the messages
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0  # end of the current wait, by the loop's clock
        self._timer: asyncio.TimerHandle | None = None  # shared by several waits, because timers are expensive

    def put(self, message: bytes) -> None:
        """Add a message.

        If the messages exceed the limit, drop all of them, because the journal also contains the events.
        """
        if self._signal is Signal.LAGGED:
            return
        self._num_bytes += len(message)
        if self._num_bytes > MAX_UNREAD_BYTES:
            self._drop()
            self._signal = self._signal or Signal.LAGGED
        else:
            self._messages.append(message)
        self._wake()

    def subscribed(self) -> None:
        """Notify the reader that the channel is subscribed, for the first time or again after a lost connection."""
        self._drop()
        self._signal = Signal.SUBSCRIBED
        self._wake()

    def fail(self, error: Exception) -> None:
        """Make the reader raise the error, because no further messages will arrive."""
        self._failure = error
        self._wake()

    async def get(self, timeout_s: float) -> list[bytes] | Signal:
        """Return the unread messages, or wait for new messages or a signal. Raises the error that `fail` received."""
        if not self._has_news():
            await self._wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        if self._signal is not None:
            signal, self._signal = self._signal, None
            return signal
        messages = self._messages
        self._drop()
        return messages or Signal.SILENCE

    def _has_news(self) -> bool:
        return bool(self._messages) or self._signal is not None or self._failure is not None

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
        """Cancel the timer, because the reader has left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self) -> None:
        self._messages, self._num_bytes = [], 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Wire(Protocol):
    """The connection that `Subscriptions` uses. After any failure, `replies` raises RedisError."""

    def send(self, command: Sequence[bytes]) -> None:
        """Send a command without waiting for a reply. Commands are sent in the order of the calls."""

    async def replies(self) -> list[Any]:
        """Wait for replies, and return at least one reply."""

    def abort(self) -> None:
        """Abort the connection, so that `replies` raises."""

    async def close(self) -> None:
        """Close the connection."""


class RedisWire:
    """A connection from a client's pool, which supports every format of `redis_url`.

    Reading with redis-py takes about 40 µs per message. Here, a single read from the socket returns many messages, and
    hiredis parses each message in less than 1 µs.
    """

    def __init__(self, redis: Redis, connection: Any) -> None:
        self._pool = redis.connection_pool
        self._connection = connection
        self._reader, self._writer = streams_of(connection)
        self._parser = hiredis.Reader(notEnoughData=_NOTHING)

    @classmethod
    async def open(cls, redis: Redis) -> RedisWire:
        """Connect. Raises RedisError."""
        return cls(redis, await take_connection(redis.connection_pool))

    def send(self, command: Sequence[bytes]) -> None:
        self._writer.writelines(self._connection.pack_command(*command))

    async def replies(self) -> list[Any]:
        replies: list[Any] = []
        while not replies:
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError as error:
                raise RedisConnectionError(str(error)) from error
            if not data:
                raise RedisConnectionError("Redis closed the subscription connection")
            self._parser.feed(data)
            while (reply := self._parser.gets()) is not _NOTHING:
                if isinstance(reply, hiredis.ReplyError):
                    refused = ResponseError(str(reply))
                    raise refusal_of(refused) or refused
                replies.append(reply)
        return replies

    def abort(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        try:
            await self._connection.disconnect(nowait=True)
        except RedisError as error:
            log.debug("subscription connection not closed", detail=error)
        await self._pool.release(self._connection)


class Subscriptions:
    """The subscriptions of all readers in one event loop. Not thread-safe.

    The first reader opens the connection. A lost connection is reopened immediately, and every reader receives
    `SUBSCRIBED` again. If reopening fails, every reader receives the error, and the next reader that joins opens a new
    connection.
    """

    def __init__(self, connect: Callable[[], Awaitable[Wire]]) -> None:
        self._connect = connect
        self._boxes: dict[bytes, list[Mailbox]] = {}
        self._task: asyncio.Task[None] | None = None
        self._wire: Wire | None = None
        # State of the current connection:
        self._sent: set[bytes] = set()  # subscribed channels, once Redis has processed all commands
        self._unconfirmed: Counter[bytes] = Counter()  # subscriptions that Redis has not confirmed
        self._changed: set[bytes] = set()  # channels of readers that have joined or left since the last command
        self._num_silent_ticks = 0

    @contextmanager
    def mailbox(self, channel: str) -> Iterator[Mailbox]:
        """Yield a mailbox that receives the messages of the channel."""
        box = Mailbox(channel.encode())
        self._boxes.setdefault(box.channel, []).append(box)
        if self._task is None:
            # An empty context, because the task outlives the reader that starts it.
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
        """Close the connection. The remaining readers receive a RuntimeError."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])
            if self._task is task:  # cancelled before it started
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

    # Commands, which are sent once per iteration of the event loop

    def _change(self, channel: bytes) -> None:
        if self._wire is not None:
            if not self._changed:
                asyncio.get_running_loop().call_soon(self._flush)
            self._changed.add(channel)

    def _flush(self) -> None:
        changed, self._changed = self._changed, set()
        if self._wire is None:
            return
        added = [channel for channel in changed if channel in self._boxes and channel not in self._sent]
        removed = [channel for channel in changed if channel not in self._boxes and channel in self._sent]
        self._send(self._wire, b"UNSUBSCRIBE", removed)
        self._send(self._wire, b"SUBSCRIBE", added)
        self._sent.difference_update(removed)
        self._sent.update(added)
        self._unconfirmed.update(added)

    @staticmethod
    def _send(wire: Wire, command: bytes, channels: list[bytes]) -> None:
        for start in range(0, len(channels), PAGE):
            wire.send([command, *channels[start : start + PAGE]])

    # The task

    async def _serve(self) -> None:
        """Serve until the last reader leaves, the task is cancelled, or Redis refuses the connection."""
        failure: Exception = _closed()
        try:
            while self._boxes:
                await self._serve_connection(await self._connect())
        except RedisError as error:
            failure = error
        except Exception as error:
            log.error("subscriptions failed", exc_info=True, detail="all streams of this event loop receive the error")
            failure = error
        finally:
            self._end(failure)

    def _end(self, failure: Exception) -> None:
        """Make the remaining readers raise the error. The next reader starts a new task."""
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
                self._num_silent_ticks, has_served = 0, True
                for reply in replies:
                    self._handle(reply)
        except RedisConnectionError as error:
            if not has_served:
                raise
            if self._boxes:  # else `_tick` closed it because there are no readers
                log.info("subscription connection lost", detail=f"{error}; reconnecting")
        finally:
            ticking.cancel()
            self._wire, self._sent, self._unconfirmed, self._num_silent_ticks = None, set(), Counter(), 0
            await wire.close()

    async def _tick(self, wire: Wire) -> None:
        """Abort the connection when there are no readers, or when Redis stops replying to pings."""
        await asyncio.sleep(TICK_S)
        while self._boxes and self._num_silent_ticks < MAX_SILENT_TICKS:
            self._num_silent_ticks += 1
            wire.send([b"PING"])
            await asyncio.sleep(TICK_S)
        wire.abort()

    def _handle(self, reply: Any) -> None:
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
    return RuntimeError("the client was closed while a stream was open")

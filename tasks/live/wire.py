"""One connection to Redis for published messages: it sends commands, and returns replies as they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import hiredis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError, RedisError, ResponseError

from cellama.tasks.connection.kombu_internals import streams_of
from cellama.tasks.connection.refusals import refusal_of

log = logging.getLogger(__name__)

READ_BYTES = 1 << 16  # per read of the socket: some hundred events
_NOTHING = object()


class Wire(Protocol):
    """What `Subscriptions` need of a connection. All failures raise RedisError in `replies`."""

    def send(self, command: Sequence[bytes]) -> None:
        """Send a command without waiting, in the order of calls."""

    async def replies(self) -> list[Any]:
        """Wait for replies, and return one or more."""

    def abort(self) -> None:
        """Abort the connection, so that `replies` raises."""

    async def close(self) -> None:
        """Close the connection."""


class RedisWire:
    """A connection from the pool of a client, so that every form of URL works.

    redis-py's own reading costs some 40 µs per message; one read of the socket brings many, and hiredis parses each
    in less than one.
    """

    def __init__(self, redis: Redis, connection: Any) -> None:
        self._pool = redis.connection_pool
        self._connection = connection
        self._reader, self._writer = streams_of(connection)
        self._parser = hiredis.Reader(notEnoughData=_NOTHING)

    @classmethod
    async def open(cls, redis: Redis) -> RedisWire:
        """Connect. Raises RedisError."""
        return cls(redis, await redis.connection_pool.get_connection())  # type: ignore[no-untyped-call]

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
                raise RedisConnectionError("Redis has closed the connection of the subscriptions")
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
            log.debug("can't close a connection: %s", error)
        await self._pool.release(self._connection)

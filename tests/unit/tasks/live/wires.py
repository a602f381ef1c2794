"""A simulated connection to Redis, whose replies the test defines and whose commands it checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

TURNS = 50  # iterations of the event loop, more than any of these tests needs to settle


class ScriptedWire:
    """Records commands, and confirms them unless `confirms` is false."""

    def __init__(self, confirms: bool = True) -> None:
        self.sent: list[Sequence[bytes]] = []
        self.channels: set[bytes] = set()
        self.closed = asyncio.Event()
        self._confirms = confirms
        self._replies: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, command: Sequence[bytes]) -> None:
        self.sent.append(command)
        kind, *channels = command
        (self.channels.update if kind == b"SUBSCRIBE" else self.channels.difference_update)(channels)
        if self._confirms and kind != b"PING":
            self.confirm(command)

    def confirm(self, command: Sequence[bytes]) -> None:
        for channel in command[1:]:
            self.reply([command[0].lower(), channel, 1])

    def reply(self, reply: Any) -> None:
        self._replies.put_nowait(reply)

    def publish(self, channel: bytes, data: bytes) -> None:
        if channel in self.channels:
            self.reply([b"message", channel, data])

    async def replies(self) -> list[Any]:
        found = [await self._replies.get()]
        while not self._replies.empty():
            found.append(self._replies.get_nowait())
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return found

    def abort(self) -> None:
        self.reply(RedisConnectionError("aborted"))

    async def close(self) -> None:
        self.closed.set()

    @property
    def is_closed(self) -> bool:
        return self.closed.is_set()

    def commands(self, kind: bytes) -> list[set[bytes]]:
        """Return the channels of each command of this kind."""
        return [set(channels) for name, *channels in self.sent if name == kind]


class Wires:
    """Returns the next wire of a script for each connection, or raises the exception in its place."""

    def __init__(self, *script: ScriptedWire | Exception) -> None:
        self.script = list(script)

    async def connect(self) -> ScriptedWire:
        wire = self.script.pop(0)
        if isinstance(wire, Exception):
            raise wire
        return wire


async def settle(until: Callable[[], Any] = lambda: False) -> None:
    """Iterate the event loop until the condition holds, or nothing is left to do."""
    for _ in range(TURNS):
        if until():
            return
        await asyncio.sleep(0)

"""A proxy in front of a Redis that refuses any command with any reply, as the test chooses."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import hiredis

from cellama.api.machine.redis_server import LOOPBACK, RedisServer

READ_BYTES = 1 << 16
READS = frozenset(
    "AUTH CLIENT ECHO EXISTS GET HELLO HEXISTS HGET HGETALL HMGET INFO LLEN LRANGE MGET PING PSUBSCRIBE PUBLISH "
    "PUNSUBSCRIBE SELECT SMEMBERS SUBSCRIBE TIME TTL UNSUBSCRIBE XRANGE XREVRANGE ZCARD ZMSCORE ZRANGE "
    "ZRANGEBYSCORE ZRANK ZSCORE".split()
)
_NOTHING = object()

Refuses = Callable[[str, bytes], bool]  # name of a command, and its first argument


def everything(command: str, _: bytes) -> bool:
    """Return whether a busy or loading Redis refuses this command."""
    return command not in ("AUTH", "CLIENT", "HELLO")


def brpop(command: str, _: bytes) -> bool:
    return command == "BRPOP"


def writes(command: str, _: bytes) -> bool:
    """Return whether a replica, or a master without enough replicas, refuses this command. Scripts count as writes."""
    return command not in READS


def needs_memory(command: str, first: bytes) -> bool:
    """Return whether a full Redis refuses this command. Taking messages is allowed."""
    return writes(command, first) and command != "BRPOP"


class RefusingRedis:
    """Forwards everything to this server, except while it refuses commands."""

    def __init__(self, server: RedisServer) -> None:
        self.target = (LOOPBACK, server.port)
        self.direct_url = server.url
        self._reply = b""
        self._refuses: Refuses = lambda command, first: False
        self.lost = ""
        self.refused: Counter[str] = Counter()  # by command, since the last `refusing`
        self._listener = socket.create_server((LOOPBACK, 0))
        self.url = server.url.replace(f":{server.port}/", f":{self._listener.getsockname()[1]}/")
        self._links: list[_Link] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def refusing(self, reply: str, refuses: Refuses) -> Iterator[Counter[str]]:
        """Answers these commands like that, for the length of a `with` block."""
        self.refused.clear()
        self._reply, self._refuses = f"-{reply}\r\n".encode(), refuses
        try:
            yield self.refused
        finally:
            self._refuses = lambda command, first: False

    @contextlib.contextmanager
    def losing_replies(self, command: str) -> Iterator[None]:
        """Lets Redis do this command, and then cuts the connection instead of bringing its reply."""
        self.lost = command
        try:
            yield
        finally:
            self.lost = ""

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for link in self._links:
            link.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._links.append(_Link(self, client))

    def answer(self, command: str, first: bytes) -> bytes | None:
        """The reply, if this command is refused now."""
        if not self._refuses(command, first):
            return None
        self.refused[command] += 1
        return self._reply


class _Link:
    """One client's connection, and that to the server."""

    def __init__(self, proxy: RefusingRedis, client: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = socket.create_connection(proxy.target)
        self._loses = False
        self._num_due = 0  # replies of the server; as long as there are some, its replies come first
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=way, daemon=True) for way in (self._forth, self._back)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._end()
        for thread in self._threads:
            thread.join()
        self._client.close()
        self._server.close()

    def _forth(self) -> None:
        parser = hiredis.Reader(notEnoughData=_NOTHING)
        with contextlib.suppress(OSError):
            while data := self._client.recv(READ_BYTES):
                parser.feed(data)
                while (command := parser.gets()) is not _NOTHING:
                    self._forward(command)
        self._end()

    def _forward(self, command: list[bytes]) -> None:
        name = command[0].decode().upper()
        self._loses = name == self._proxy.lost
        with self._lock:
            reply = None if self._num_due else self._proxy.answer(name, b"".join(command[1:2]))
            self._num_due += reply is None
        if reply is None:
            parts = [b"*%d\r\n" % len(command), *(b"$%d\r\n%b\r\n" % (len(part), part) for part in command)]
            self._server.sendall(b"".join(parts))
        else:
            self._client.sendall(reply)

    def _back(self) -> None:
        parser: Any = hiredis.Reader(notEnoughData=_NOTHING)
        with contextlib.suppress(OSError):
            while (data := self._server.recv(READ_BYTES)) and not self._loses:
                parser.feed(data)
                while parser.gets() is not _NOTHING:
                    with self._lock:
                        self._num_due = max(0, self._num_due - 1)  # what is published was not asked for
                self._client.sendall(data)  # now: it may send its next command at once
        self._end()

    def _end(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

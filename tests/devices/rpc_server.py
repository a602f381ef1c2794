"""Run llama.cpp's RPC servers on loopback. To llama.cpp, each server is a GPU that computes on this machine's CPU.

llama.cpp needs RPC support, which `environment.py` builds. Three properties of RPC servers affect tests:

- A server serves one client process at a time. Other clients wait until this process has freed its models.
- When a server exits, each process that uses the server aborts. Stop servers after their clients.
- A process can't remove a server's devices. Use the same servers in all tests of a process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cellama.api.machine.redis_server import LOOPBACK, die_with, free_port

from ..conftest import wait_until
from . import serve

STOP_TIMEOUT_S = 10.0


def has_rpc() -> bool:
    """Return whether the installed llama.cpp was built with RPC."""
    return serve.library("ggml-rpc").exists()


@dataclass(frozen=True)
class RpcServer:
    """A running RPC server."""

    address: str  # host:port
    process: subprocess.Popen[bytes]
    log_path: Path

    @staticmethod
    def start(log_path: Path, *, num_devices: int = 1, num_threads: int = 1) -> RpcServer:
        """Start a server. It also stops when the thread that started it exits."""
        address = f"{LOOPBACK}:{free_port()}"
        argv = [sys.executable, serve.__file__, address, str(num_devices), str(num_threads)]
        with log_path.open("wb") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=die_with(os.getpid()))
        return RpcServer(address, process, log_path)

    def wait_ready(self) -> None:
        """Wait until the server accepts connections."""

        def accepts() -> bool:
            assert self.process.poll() is None, f"the RPC server exited:\n{self.log()}"
            host, _, port = self.address.partition(":")
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))):
                return True
            return False

        wait_until(accepts, f"connections to {self.address}")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def kill(self) -> None:
        """Kill the server, as if its machine had crashed."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop the server. Repeated calls have no effect."""
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()


@contextlib.contextmanager
def rpc_servers(folder: Path, num_servers: int = 2, *, num_devices: int = 1) -> Iterator[list[RpcServer]]:
    """Start servers with the given number of devices each, and stop these servers at the end of the `with` block.

    The servers write their logs to the directory.
    """
    with contextlib.ExitStack() as started:
        servers = []
        for number in range(num_servers):
            server = RpcServer.start(folder / f"rpc{number}.log", num_devices=num_devices)
            started.callback(server.stop)
            servers.append(server)
        for server in servers:
            server.wait_ready()
        yield servers

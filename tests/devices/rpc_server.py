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
from collections.abc import Iterator, Sequence
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
    def start(log_path: Path, memory_bytes: int) -> RpcServer:
        """Start a server whose device has this much memory. It also stops when the thread that started it exits."""
        address = f"{LOOPBACK}:{free_port()}"
        argv = [sys.executable, serve.__file__, address, str(memory_bytes)]
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
def rpc_servers(folder: Path, sizes: Sequence[int]) -> Iterator[list[RpcServer]]:
    """Start one server per memory size in bytes, and stop these servers at the end of the `with` block.

    The servers write their logs to the directory. They report the memory sizes as total and free memory, but don't
    limit allocations.
    """
    with contextlib.ExitStack() as started:
        servers = []
        for number, memory_bytes in enumerate(sizes):
            server = RpcServer.start(folder / f"rpc{number}.log", memory_bytes)
            started.callback(server.stop)
            servers.append(server)
        for server in servers:
            server.wait_ready()
        yield servers

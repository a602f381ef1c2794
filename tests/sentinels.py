"""A master, its replica and the sentinels that watch them: real processes on this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import time
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from cellama.api.machine.redis_server import LOOPBACK, RedisServer, die_with, find_redis_binary, free_port

MASTER_NAME = "cellama-test"
DOWN_AFTER_MS = 1000
START_TIMEOUT_S = 60.0


class SentinelSetup:
    """Two servers and some sentinels, for as long as the context lasts."""

    def __init__(self, folder: Path, num_sentinels: int = 1, password: str | None = None) -> None:
        self._folder = folder
        self._password = password or secrets.token_urlsafe()
        self.servers = [
            RedisServer(free_port(), folder / f"redis{n}", self._password, admin_commands=True) for n in range(2)
        ]
        self._ports = [free_port() for _ in range(num_sentinels)]
        self._sentinels: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SentinelSetup:
        for server in self.servers:
            server.run()
        self._replicate(self.servers[1], self.servers[0].port)
        for port in self._ports:
            self._start_sentinel(port)
        self._wait_for(lambda info: info["num-slaves"] == 1 and info["num-other-sentinels"] == len(self._ports) - 1)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for process in self._sentinels:
            process.kill()
            process.wait()
        for server in self.servers:
            server.stop()

    @property
    def url(self) -> str:
        places = ";".join(f":{self._password}@{LOOPBACK}:{port}" for port in self._ports)
        return f"sentinel://{places}/0?master_name={MASTER_NAME}"

    def master(self) -> RedisServer:
        """The server that the sentinels name now."""
        port = self._state()["port"]
        return next(server for server in self.servers if server.port == port)

    def kill_master(self) -> RedisServer:
        """Ends the master without a warning; returns when the sentinels name the other server."""
        dead = self.master()
        assert dead.process is not None
        dead.process.kill()
        dead.process.wait()
        self._wait_for(lambda info: info["port"] != dead.port)
        return dead

    def hand_over(self) -> None:
        """Lets the sentinels make the replica the master, as one does for maintenance."""
        before = self._state()["port"]
        with self._sentinel() as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", MASTER_NAME)
        self._wait_for(lambda info: info["port"] != before)

    def bring_back(self, server: RedisServer) -> None:
        """Starts a server that was killed, as a replica of the one that took its place."""
        server.run()
        self._replicate(server, self.master().port)
        self._wait_for_link(server)

    def wait_until_replicated(self) -> None:
        """Returns when the replica follows the master."""
        master = self.master()
        self._wait_for_link(next(server for server in self.servers if server is not master))

    def _client(self, port: int, password: str | None = None) -> Redis:
        return Redis(host=LOOPBACK, port=port, password=password, decode_responses=True)

    def _sentinel(self) -> Redis:
        return self._client(self._ports[0])

    def _replicate(self, server: RedisServer, master_port: int) -> None:
        with self._client(server.port, self._password) as redis:
            redis.config_set("masterauth", self._password)
            redis.replicaof(LOOPBACK, str(master_port))

    def _wait_for_link(self, server: RedisServer) -> None:
        def is_up() -> bool:
            with self._client(server.port, self._password) as redis:
                info: Any = redis.info("replication")
                return bool(info.get("master_link_status") == "up")

        _wait_until(is_up, "the replica follows")

    def _start_sentinel(self, port: int) -> None:
        folder = self._folder / f"sentinel{port}"
        folder.mkdir(parents=True)
        quorum = len(self._ports) // 2 + 1
        lines = [
            f"port {port}",
            f"bind {LOOPBACK}",
            f"sentinel monitor {MASTER_NAME} {LOOPBACK} {self.servers[0].port} {quorum}",
            f"sentinel down-after-milliseconds {MASTER_NAME} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {MASTER_NAME} 10000",
        ]
        lines.append(f"sentinel auth-pass {MASTER_NAME} {self._password}")
        config = folder / "sentinel.conf"  # which the sentinel rewrites
        config.write_text("\n".join(lines) + "\n")
        with (folder / "sentinel.log").open("wb") as log:
            argv = [str(find_redis_binary()), str(config), "--sentinel"]
            self._sentinels.append(subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=die_with(os.getpid())))

    def _state(self) -> dict[str, Any]:
        with self._sentinel() as sentinel:
            state: dict[str, Any] = sentinel.sentinel_master(MASTER_NAME)
            return state

    def _wait_for(self, condition: Any) -> None:
        def holds() -> bool:
            with contextlib.suppress(RedisError):
                return bool(condition(self._state()))
            return False

        _wait_until(holds, "the sentinels agree")


def _wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(RedisError):
            if condition():
                return
        time.sleep(0.05)
    raise RuntimeError(f"not seen within {START_TIMEOUT_S:g} s: {what}")

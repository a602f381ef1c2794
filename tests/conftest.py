"""Real parts for the tests: a Redis, a worker process. Each test run has ports and folders of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from redis import Redis

from cellama.api.client.registry_views import COUNTED
from cellama.api.machine.redis_server import LOOPBACK, RedisServer, die_with, free_port
from cellama.api.machine.supervisor import worker_argv
from cellama.bench.harness import pace
from cellama.config import get_settings
from cellama.tasks.connection.connections import connect
from cellama.tasks.state.registry import WorkerEntry, live_workers

PATIENCE_S = 60.0  # generous: the machines are shared
SLOTS = 16
MODELS = json.dumps([{"id": "tiny", "source": "bundled://tiny", "n_parallel": SLOTS, "threads": 1, "default": True}])
# Factor for the number of examples that property tests draw. `make thorough` sets it to ten.
EXAMPLES = int(os.environ.get("TEST_EXAMPLES", "1"))
# The same examples in every run; HYPOTHESIS_PROFILE=default looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

RESERVED = socket.socket()  # nobody else is given its port until the Redis of the test run takes it
RESERVED.bind((LOOPBACK, free_port()))
REDIS_PORT = RESERVED.getsockname()[1]
REDIS_PASSWORD = secrets.token_urlsafe()
CACHE = Path(__file__).parents[1] / "build" / "test-cache"  # nothing that a person has tuned counts in tests


def pytest_configure() -> None:
    """This process is a producer for the Redis of the test run. Collecting tests makes Celery read the settings."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, and so would children
    for name in [name for name in os.environ if name.startswith("CELLAMA_")]:
        del os.environ[name]
    os.environ["CELLAMA_REDIS_URL"] = f"redis://:{REDIS_PASSWORD}@127.0.0.1:{REDIS_PORT}/0"
    os.environ["XDG_CACHE_HOME"] = str(CACHE)
    os.environ.pop("COLUMNS", None)  # commands speak as to no terminal; xdist sets it
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # llama.cpp's threads wait without taking a core from others
    get_settings.cache_clear()


def pytest_unconfigure() -> None:
    RESERVED.close()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line per failure at the end, because pytest cuts its own lines off or prints whole logs in CI."""
    failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    if failed:
        terminalreporter.section("failed")
    for report in failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
        terminalreporter.line(f"FAILED {report.nodeid} - {' '.join(reason.split())[:200]}")


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Polls until the condition gives something true, and returns that."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"not seen within {timeout_s} s: {what}")


def worker_entry(name: str, *models: Any, host: str = "host", seen_at: float = 0.0, **cores: Any) -> WorkerEntry:
    """A worker as the registry has it, which need not be there."""
    known: Any = {"machine": "here", "processors": [0, 1], "wants": 2, "uses": 1.0, "threads": 1, **cores}
    memory: Any = {"budget": "auto", "on_full": "refuse", "devices": []}
    totals: Any = {"phase": "idle", **dict.fromkeys(COUNTED, 0)}
    return WorkerEntry(name, host, 1, seen_at, seen_at, list(models), {}, memory, known, totals, seen_at)


def clean_environment(**variables: str) -> dict[str, str]:
    """This environment without settings of cellama, and with these variables, except for empty ones.

    Unless the variables say otherwise, idle workers measure nothing.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CELLAMA_")}
    wanted = {"CELLAMA_AUTO_TUNE_S": "0", **variables}
    return {**kept, **{name: value for name, value in wanted.items() if value}}


def paced(models: str) -> str:
    """The models, such that `pace.slowed` makes work that lasts on any machine."""
    return json.dumps([{"batch_strategy": pace.STRATEGY, **model} for model in json.loads(models)])


class WorkerProcess:
    """A `celery worker` of our app. Its log is shown when it does not start."""

    def __init__(self, folder: Path, redis_url: str, name: str = "worker", **settings: str) -> None:
        self.log_path = folder / "worker.log"
        self.redis = connect(redis_url)
        self._pace_file = folder / "pace"
        settings = {"CELLAMA_MODELS": MODELS, pace.PACE_FILE: str(self._pace_file), **settings}
        settings["CELLAMA_MODELS"] = paced(settings["CELLAMA_MODELS"])
        environment = clean_environment(CELLAMA_REDIS_URL=redis_url, **settings)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                worker_argv(f"{name}@%h"),
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                preexec_fn=die_with(os.getpid()),  # however the test run ends
            )

    def wait_ready(self) -> WorkerProcess:
        def registered() -> bool:
            assert self.process.poll() is None, f"the worker ended:\n{self.log()}"
            return any(entry.pid == self.process.pid for entry in live_workers(self.redis))

        wait_until(registered, "the worker in the registry")
        return self

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def engine(self) -> dict[str, Any]:
        """Return the engine's snapshot from the last heartbeat."""

        def entries() -> list[WorkerEntry]:
            return [entry for entry in live_workers(self.redis) if entry.pid == self.process.pid]

        snapshot: dict[str, Any] = wait_until(entries, "a heartbeat")[0].models[0]["engine"]
        return snapshot

    def engine_now(self) -> dict[str, Any]:
        """Return the engine's snapshot from a heartbeat that starts after this call."""
        seconds, micros = self.redis.time()
        now = float(seconds) + micros / 1e6  # type: ignore[operator]

        def told() -> bool:
            return any(e.pid == self.process.pid and e.at > now for e in live_workers(self.redis))

        wait_until(told, "a heartbeat")
        return self.engine()

    def slowed(self, seconds: float = pace.SLOW_S) -> contextlib.AbstractContextManager[None]:
        """Each step takes so long, for the length of a `with` block: a long job then lasts more than a minute."""
        return pace.slowed(self._pace_file, seconds)

    def stop(self) -> int:
        """Stop the process; see `end_process`."""
        self.redis.close()
        return end_process(self.process)


def end_process(process: subprocess.Popen[bytes]) -> int:
    """SIGTERM, then SIGKILL if that takes too long; returns the exit code."""
    process.terminate()
    try:
        return process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    RESERVED.close()
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer.start(folder, port=REDIS_PORT, password=REDIS_PASSWORD) as server:
        yield server


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[Redis]:
    with Redis.from_url(redis_server.url) as client:
        yield client


@contextlib.contextmanager
def empty_database(server: RedisServer, number: int) -> Iterator[str]:
    """The URL of a database of this server that is empty before and after the block."""
    url = server.url.removesuffix("/0") + f"/{number}"
    with Redis.from_url(url) as redis:
        redis.flushdb()
        yield url
        redis.flushdb()


@pytest.fixture(scope="session")
def worker(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """One worker with the bundled model and 16 slots for the whole run."""
    process = WorkerProcess(tmp_path_factory.mktemp("worker"), redis_server.url, CELLAMA_REASONING_KEY="a secret")
    try:
        yield process.wait_ready()
    finally:
        code = process.stop()
    assert code == 0, process.log()


@pytest.fixture(scope="session")
def gateway(
    worker: WorkerProcess, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """One gateway in front of the worker, for the whole run: a GatewayProcess."""
    from .gateways import GatewayProcess  # which needs this module

    folder = tmp_path_factory.mktemp("gateway")
    process = GatewayProcess(folder, redis_server.url, CELLAMA_GATEWAY_WEBHOOK_PRIVATE="true")
    try:
        yield process.wait_ready()
    finally:
        code = process.stop()
    assert code == 0, process.log()
    assert "Traceback" not in process.log()


@pytest.fixture
def settings_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Sets CELLAMA_ variables for this process, and forgets the settings that were read before and after."""
    for name in [name for name in os.environ if name.startswith("CELLAMA_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)  # no cellama.toml of anybody

    def set_variables(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(f"CELLAMA_{name.upper()}", value)
        get_settings.cache_clear()

    set_variables()
    yield set_variables
    get_settings.cache_clear()


def descendants(pid: int) -> Mapping[int, str]:
    """The processes below one, by id, with their command."""
    return {child.pid: " ".join(child.cmdline()) for child in psutil.Process(pid).children(recursive=True)}

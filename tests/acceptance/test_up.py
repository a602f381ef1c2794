"""Test how `cellama up` starts its services, restarts services that crash, and stops."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from redis import Redis
from redis.exceptions import RedisError

from cellama.api.machine.redis_server import die_with, find_redis_binary, free_port
from cellama.config.local_redis import URL_FILE, redis_dir

from ..conftest import MODELS, PATIENCE_S, clean_environment, descendants, wait_until
from .machines import CELLAMA, Machine, up

SERVER = re.compile(r"(valkey|redis)-server ")


@pytest.fixture
def own_machine(tmp_path: Path) -> Iterator[Machine]:
    """Yield a separate machine, for tests that kill some of its processes."""
    with up(tmp_path) as machine:
        yield machine


def test_up_starts_the_gateway_when_requested(tmp_path: Path) -> None:
    port = free_port()
    with up(tmp_path, "--no-flower", "--gateway-port", str(port)) as machine:
        url = f"http://127.0.0.1:{port}"
        assert f"{url}/v1" in machine.output()
        answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "Once"}, timeout=PATIENCE_S)
        assert answer.json()["usage"]["completion_tokens"] > 0
        children = descendants(machine.process.pid)
    wait_until(lambda: not any(map(is_running, children)), "the end of all children")


def test_up_fails_when_the_gateway_does_not_start(tmp_path: Path) -> None:
    environment = clean_environment(
        CELLAMA_REDIS_URL=f"redis://127.0.0.1:{free_port()}/0",
        CELLAMA_DATA_DIR=str(tmp_path / "data"),
        CELLAMA_MODELS=MODELS,
        CELLAMA_GATEWAY_KEYS_FILE="/nowhere.toml",
    )
    argv = [*CELLAMA, "up", "--no-flower", "--gateway-port", str(free_port())]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, timeout=PATIENCE_S, text=True)
    assert (done.returncode, "cellama is up" in done.stdout) == (1, False)
    assert "the gateway did not start; end of its log:" in done.stderr
    assert "gateway_keys_file: '/nowhere.toml' can't be read" in done.stderr


def test_up_restarts_killed_processes_and_stops_everything_on_ctrl_c(own_machine: Machine) -> None:
    def worker() -> int | None:
        status = json.loads(own_machine.run("status", "--json").stdout)
        alive = [entry["pid"] for entry in status["live"] if psutil.pid_exists(entry["pid"])]
        return alive[0] if alive else None

    before = wait_until(worker, "a worker")
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: worker() not in (None, before), "another worker")
    check_that_a_job_continues_when_redis_dies(own_machine)
    children = descendants(own_machine.process.pid)
    assert len(children) >= 3  # Redis, the worker and Flower
    own_machine.process.send_signal(signal.SIGINT)
    assert own_machine.process.wait(PATIENCE_S) == 0
    wait_until(lambda: not any(map(is_running, children)), "the end of all children")


def check_that_a_job_continues_when_redis_dies(machine: Machine) -> None:
    argv = [*CELLAMA, "generate", "tiny", "Once upon a time", "--ignore-eos", "--max-tokens", "60", "--json"]
    options: dict[str, Any] = {"cwd": machine.folder, "env": machine.environment, "text": True}
    with machine.slowed(), subprocess.Popen(argv, stdout=subprocess.PIPE, **options) as job:
        assert job.stdout is not None
        assert [json.loads(job.stdout.readline())["type"] for _ in range(2)] == ["started", "token"]
        os.kill(redis_of(machine), signal.SIGKILL)
        events = [json.loads(line) for line in job.stdout]
    assert (events[-1]["type"], events[-1]["finish_reason"]) == ("done", "length")
    assert "child process exited (child=redis, code=-9" in machine.output()


def test_up_uses_a_passwordless_redis_at_the_address_of_its_previous_server(tmp_path: Path) -> None:
    port = free_port()
    directory = redis_dir(tmp_path / "data")
    directory.mkdir(parents=True)
    (directory / URL_FILE).write_text(f"redis://:old@127.0.0.1:{port}/0")
    argv = [str(find_redis_binary()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.DEVNULL, preexec_fn=die_with(os.getpid())) as system:
        try:
            wait_until(lambda: answers(port), "the Redis of the system")
            with up(tmp_path, "--no-flower", redis_port=port) as machine:
                assert "embedded" not in machine.output()
                done = machine.run("generate", "tiny", "Once upon a time", "--temperature", "0", "--max-tokens", "4")
                assert done.stdout.strip() == ", there was a", done.stderr
            assert not (directory / URL_FILE).exists()
        finally:
            system.terminate()


def answers(port: int) -> bool:
    with contextlib.suppress(RedisError), Redis(port=port) as redis:
        return bool(redis.ping())
    return False


def test_ctrl_c_stops_everything_immediately_when_redis_is_down(own_machine: Machine) -> None:
    children = descendants(own_machine.process.pid)
    os.kill(redis_of(own_machine), signal.SIGKILL)
    own_machine.process.send_signal(signal.SIGINT)
    assert own_machine.process.wait(PATIENCE_S) == 0
    wait_until(lambda: not any(map(is_running, children)), "the end of all children")


def is_running(pid: int) -> bool:
    """Return whether the process is running. A zombie, such as the child of a killed worker, is not running."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def redis_of(machine: Machine) -> int:
    return next(pid for pid, command in descendants(machine.process.pid).items() if SERVER.search(command))


@pytest.mark.parametrize(
    ("models", "message"),
    [("m=nowhere.gguf", "'nowhere.gguf' does not exist"), ("m=text.gguf", "is not a GGUF file")],
)
def test_worker_reports_a_bad_model_once_and_exits(
    redis_server: Any, tmp_path: Path, models: str, message: str
) -> None:
    (tmp_path / "text.gguf").write_text("I am no model")
    environment = clean_environment(CELLAMA_REDIS_URL=redis_server.url, CELLAMA_MODELS=models)
    argv = [*CELLAMA, "worker"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, timeout=PATIENCE_S, text=True)
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count(message) == 1
    assert "Traceback" not in done.stderr


def model(**options: Any) -> str:
    return json.dumps([{"id": "m", "source": "bundled://tiny", **options}])


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("m=text.gguf", "models.m.source: 'text.gguf' is not a GGUF file"),
        (model(n_parallel=8, n_batch=4), "models.m: n_batch is 4; it must be at least n_parallel (8)"),
    ],
)
def test_up_reports_an_unusable_model_on_one_line_before_starting_anything(
    tmp_path: Path, models: str, message: str
) -> None:
    (tmp_path / "text.gguf").write_text("I am no model")
    done = up_that_fails(tmp_path, models)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")
    assert done.stdout == ""
    assert not (tmp_path / "data").exists()  # no log, no Redis


def test_up_reports_a_damaged_model_without_the_worker_log(tmp_path: Path) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(100))
    done = up_that_fails(tmp_path, "m=damaged.gguf")
    assert done.returncode == 2
    assert "damaged.gguf" in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert "celery@" not in done.stderr
    assert "Traceback" not in done.stderr


def up_that_fails(folder: Path, models: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(
        CELLAMA_REDIS_URL=f"redis://127.0.0.1:{free_port()}/0",
        CELLAMA_DATA_DIR=str(folder / "data"),
        CELLAMA_MODELS=models,
        COLUMNS="300",
    )
    argv = [*CELLAMA, "up", "--no-flower"]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, timeout=PATIENCE_S, text=True)

"""Test the services in docker-compose.yml: their commands, settings and health checks.

Each service runs as PID 1 of a namespace, as in a container, or as a plain process if this machine has no namespaces.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis
from redis.exceptions import RedisError

from cellama.api import Client
from cellama.api.machine.redis_server import find_redis_binary, free_port
from cellama.tasks.connection.connections import connect
from cellama.tasks.state.registry import live_workers

from ..conftest import PATIENCE_S, wait_until
from .containers import HAS_NAMESPACES, in_namespace, send_signal

ROOT = Path(__file__).parents[2]
SERVICES: Any = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
ENTRYPOINT = json.loads(re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), re.M)[-1])
MODEL = {"id": "tiny", "source": "bundled://tiny", "n_parallel": 2, "threads": 1}
CREDENTIALS = "me:secret"
WITH_TWO_GPUS = """
from cellama.api.cli import main, services
services.visible_gpus = lambda: ["CUDA0", "CUDA1"]
main()
"""


class Composed:
    """Runs services as Compose does, but with other ports and another Redis."""

    def __init__(self, folder: Path, *, in_container: bool) -> None:
        self.folder = folder
        self._in_container = in_container
        self.redis_port, self.flower_port, self.gateway_port = free_port(), free_port(), free_port()
        self.url = f"redis://127.0.0.1:{self.redis_port}/0"
        self.running: list[subprocess.Popen[bytes]] = []

    def argv(self, name: str) -> list[str]:
        service = SERVICES[name]
        parts = [*service.get("entrypoint", [] if name == "redis" else ENTRYPOINT), *service.get("command", [])]
        return [part.replace("$$", "$").replace("5555", str(self.flower_port)) for part in parts]

    def environment(self, name: str, **given: str) -> dict[str, str]:
        """Return the environment of a service, with the given values for variables that the service passes on."""
        named: dict[str, str | None] = SERVICES[name]["environment"]
        own = {
            key: value.replace("redis:6379", f"127.0.0.1:{self.redis_port}") for key, value in named.items() if value
        }
        assert given.keys() <= named.keys()
        paths = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(self.folder)}
        return {**paths, **own, **given}

    def start(self, name: str, argv: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        argv = in_namespace(argv) if self._in_container else argv
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(argv, cwd=self.folder, env=environment, stdout=log, stderr=log)
        self.running.append(process)
        return process

    def terminate(self, process: subprocess.Popen[bytes]) -> None:
        """Send SIGTERM to the service, as `docker stop` does."""
        send_signal(process, signal.SIGTERM, in_container=self._in_container)

    def end(self) -> None:
        """Stop all services. Kill services that don't stop in time, and raise TimeoutExpired."""
        for process in reversed(self.running):
            self.terminate(process)
        try:
            for process in reversed(self.running):
                process.wait(PATIENCE_S)
        finally:
            for process in self.running:
                process.kill()
                process.wait()

    def is_healthy(self, name: str, environment: dict[str, str]) -> bool:
        kind, *argv = SERVICES[name]["healthcheck"]["test"]
        assert kind == "CMD"
        argv = [part.replace("8000", str(self.gateway_port)) for part in argv]
        return subprocess.run(argv, cwd=self.folder, env=environment, capture_output=True, timeout=60).returncode == 0

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    """Start the service and its Redis."""
    composed = Composed(tmp_path, in_container=HAS_NAMESPACES)
    _, *options = composed.argv("redis")
    here = ["--port", str(composed.redis_port), "--bind", "127.0.0.1", "--dir", str(tmp_path)]
    composed.start("redis", [str(find_redis_binary()), *options, *here])

    def answers() -> bool:
        with contextlib.suppress(RedisError), Redis.from_url(composed.url) as client:
            return bool(client.ping())  # as its check of health does
        return False

    try:
        wait_until(answers, "Redis")
        yield composed
    finally:
        composed.end()


def test_compose_worker_becomes_healthy_serves_jobs_and_exits_cleanly(composed: Composed) -> None:
    environment = composed.environment("worker", CELLAMA_MODELS=json.dumps([MODEL]))
    assert not composed.is_healthy("worker", environment)
    worker = composed.start("worker", composed.argv("worker"), environment)
    wait_until(lambda: worker.poll() is not None or composed.is_healthy("worker", environment), "a healthy worker")
    assert worker.poll() is None, composed.log("worker")
    said = ["cellama", "generate", "tiny", "Once upon a time", "--max-tokens", "4", "--temperature", "0"]
    done = subprocess.run(
        said, cwd=composed.folder, env=environment, capture_output=True, timeout=PATIENCE_S, text=True
    )
    assert done.stdout.strip() == ", there was a", done.stderr
    composed.terminate(worker)
    assert worker.wait(PATIENCE_S) == 0, composed.log("worker")
    wait_until(lambda: not composed.is_healthy("worker", environment), "the end of its entry")
    for setting in ("appendonly", "maxmemory-policy"):
        assert setting not in composed.log("worker")  # the worker logs no problem with this Redis


def test_compose_gpu_worker_starts_one_worker_per_gpu(composed: Composed) -> None:
    environment = composed.environment("worker-gpu", CELLAMA_MODELS=json.dumps([MODEL]))
    argv = [sys.executable, "-c", WITH_TWO_GPUS, *SERVICES["worker-gpu"]["command"]]  # the GPUs are simulated
    service = composed.start("worker-gpu", argv, environment)
    with connect(composed.url) as redis, Client(composed.url) as client:
        wait_until(lambda: service.poll() is not None or len(live_workers(redis)) == 2, "two workers")
        assert service.poll() is None, composed.log("worker-gpu")
        assert {worker.name.partition("@")[0].rpartition("-")[2] for worker in live_workers(redis)} == {"gpu0", "gpu1"}
        assert composed.is_healthy("worker-gpu", environment)
        jobs = client.generate_many("tiny", ["Once upon a time"] * 8, max_tokens=4, temperature=0)
        assert {job.result(PATIENCE_S)["text"] for job in jobs} == {", there was a"}
        composed.terminate(service)
        assert service.wait(PATIENCE_S) == 0, composed.log("worker-gpu")
        wait_until(lambda: not live_workers(redis), "the end of their entries")


def test_compose_flower_requires_its_password(composed: Composed) -> None:
    argv = composed.argv("flower")
    without = subprocess.run(argv, cwd=composed.folder, env=composed.environment("flower"), capture_output=True)
    assert without.returncode == 1
    assert b"set FLOWER_BASIC_AUTH to user:password" in without.stderr
    flower = composed.start("flower", argv, composed.environment("flower", FLOWER_BASIC_AUTH=CREDENTIALS))

    def status(credentials: str) -> int | None:
        assert flower.poll() is None, composed.log("flower")
        request = urllib.request.Request(f"http://127.0.0.1:{composed.flower_port}/workers")
        request.add_header("Authorization", "Basic " + base64.b64encode(credentials.encode()).decode())
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return int(error.code)
        except OSError:
            return None  # Flower does not answer yet

    assert wait_until(lambda: status(CREDENTIALS), "Flower") == 200
    assert status("me:guess") == 401
    composed.terminate(flower)
    assert flower.wait(PATIENCE_S) == 0, composed.log("flower")


def test_compose_metrics_are_served_until_sigterm(composed: Composed) -> None:
    port = free_port()
    environment = composed.environment("metrics")
    metrics = composed.start("metrics", [*composed.argv("metrics"), "--port", str(port)], environment)

    def figures() -> str | None:
        assert metrics.poll() is None, composed.log("metrics")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read())
        return None

    assert "cellama_up 1" in wait_until(figures, "the figures")
    composed.terminate(metrics)
    assert metrics.wait(PATIENCE_S) == 0, composed.log("metrics")


def test_compose_gateway_serves_requests_with_an_api_key(composed: Composed) -> None:
    environment = composed.environment("gateway", CELLAMA_DATA_DIR=str(composed.folder))
    argv = [*composed.argv("gateway"), "--port", str(composed.gateway_port)]
    refused = subprocess.run(argv, cwd=composed.folder, env=environment, capture_output=True, timeout=PATIENCE_S)
    assert refused.returncode == 2
    assert b"create a key (`cellama keys create TENANT`)" in refused.stderr
    made = [*ENTRYPOINT, "keys", "create", "acme"]
    key = subprocess.run(made, cwd=composed.folder, env=environment, capture_output=True, check=True, text=True)
    gateway = composed.start("gateway", argv, environment)
    wait_until(lambda: gateway.poll() is not None or composed.is_healthy("gateway", environment), "a healthy gateway")
    assert gateway.poll() is None, composed.log("gateway")
    models = f"http://127.0.0.1:{composed.gateway_port}/v1/models"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(models, timeout=PATIENCE_S)
    asked = urllib.request.Request(models, headers={"Authorization": f"Bearer {key.stdout.strip()}"})
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        assert json.load(answer)["data"] == []
    composed.terminate(gateway)
    assert gateway.wait(PATIENCE_S) == 0, composed.log("gateway")

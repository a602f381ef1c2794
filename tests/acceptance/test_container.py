"""Test `cellama worker` and `cellama up` as PID 1 of a PID namespace without privileges, as in a container."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.harness import pace

from ..conftest import PATIENCE_S, clean_environment, descendants, paced, wait_until
from .containers import in_namespace, needs_namespace, program_of, states_inside
from .machines import CELLAMA, up

pytestmark = needs_namespace
LONG = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}


@dataclass
class Contained:
    """A `cellama worker` that runs as PID 1 of a namespace."""

    process: subprocess.Popen[bytes]
    folder: Path
    model: str

    @property
    def program(self) -> psutil.Process:
        return program_of(self.process)

    def child(self) -> psutil.Process:
        """Return the worker process that `cellama worker` keeps running."""
        known = [one for one in self.program.children() if one.status() != psutil.STATUS_ZOMBIE]
        [child] = [one for one in known if "celery" in one.cmdline()]
        return child

    def log(self) -> str:
        return (self.folder / "worker.log").read_text(errors="replace")


@pytest.fixture
def contained(tmp_path: Path, redis_server: RedisServer) -> Iterator[Contained]:
    model = f"contained-{uuid.uuid4().hex[:8]}"
    models = paced(json.dumps([{"id": model, "source": "bundled://tiny", "n_parallel": 2, "threads": 1}]))
    environment = clean_environment(CELLAMA_REDIS_URL=redis_server.url, CELLAMA_MODELS=models)
    environment[pace.PACE_FILE] = str(tmp_path / "pace")
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            in_namespace([*CELLAMA, "worker"]), cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
    contained = Contained(process, tmp_path, model)
    try:
        with Client() as client:
            wait_until(lambda: process.poll() is not None or serves(client, model), "a worker that serves")
        assert process.poll() is None, contained.log()
        yield contained
    finally:
        process.kill()  # which also ends the whole namespace
        process.wait()


def serves(client: Client, model: str) -> bool:
    return any(one["id"] == model and one["status"] == "ready" for worker in client.workers() for one in worker.models)


def test_killed_worker_under_pid_1_is_replaced_without_a_zombie(contained: Contained) -> None:
    with Client() as client:
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        assert "Paris" in client.chat(contained.model, asked, temperature=0).result(PATIENCE_S)["message"]["content"]
        child = contained.child()
        assert child.children(), "no process of the chat template that could be left behind"
        with pace.slowed(contained.folder / "pace"):
            job = client.generate(contained.model, "Once upon a time", **LONG)
            stream = job.stream(timeout=PATIENCE_S)
            assert [next(stream)["type"] for _ in range(2)] == ["started", "token"]
            child.kill()
        events = list(stream)
        assert (events[-1]["type"], events[-1]["finish_reason"]) == ("done", "length")
        again = client.generate(contained.model, "Once upon a time", **LONG).result(PATIENCE_S)
        assert job.result(PATIENCE_S)["text"] == again["text"]
    assert "child process exited (child=worker, code=-9" in contained.log()
    assert contained.child().pid != child.pid
    wait_until(lambda: "Z" not in states_inside(contained.program).values(), "the end of all zombies")
    assert 1 in states_inside(contained.program)


def test_worker_in_a_container_runs_without_privileges(contained: Contained) -> None:
    for process in (contained.program, contained.child()):
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        assert int(status["CapEff"], 16) == 0
    assert "superuser privileges" not in contained.log()  # Celery's warning if the user id is 0


def test_running_job_finishes_when_pid_1_receives_sigterm(contained: Contained) -> None:
    with Client() as client, pace.slowed(contained.folder / "pace", 0.02):
        job = client.generate(contained.model, "Once upon a time", **LONG)
        stream = job.stream(timeout=PATIENCE_S)
        assert [next(stream)["type"] for _ in range(2)] == ["started", "token"]
        contained.program.terminate()
        assert [event["type"] for event in stream if event["type"] != "token"] == ["done"]
        assert contained.process.wait(PATIENCE_S) == 0, contained.log()


def test_up_as_pid_1_serves_jobs_and_exits_on_sigterm(tmp_path: Path) -> None:
    with up(tmp_path, in_container=True) as machine:
        done = machine.run("generate", "tiny", "Once upon a time", "--temperature", "0", "--max-tokens", "4")
        assert done.stdout.strip() == ", there was a", done.stderr
        inside = descendants(machine.process.pid)
        assert len(inside) >= 4  # `cellama up`, Redis, the worker and Flower
        machine.signal(signal.SIGTERM)
        assert machine.process.wait(PATIENCE_S) == 0, machine.output()
        assert not any(map(psutil.pid_exists, inside))
        assert "child process exited" not in machine.output()


def test_command_as_pid_1_exits_on_sigterm(contained: Contained, redis_server: RedisServer) -> None:
    """Check that the command handles the signal, because Linux drops signals that PID 1 does not handle."""
    command = ["generate", contained.model, "Once upon a time", "--ignore-eos", "--max-tokens", "1000", "--json"]
    argv = in_namespace([sys.executable, "-m", "cellama_main", *command])
    options: dict[str, Any] = {"cwd": contained.folder, "env": clean_environment(CELLAMA_REDIS_URL=redis_server.url)}
    with (
        pace.slowed(contained.folder / "pace"),
        subprocess.Popen(argv, **options, stdout=subprocess.PIPE) as process,
    ):
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["type"] == "started"
            program_of(process).terminate()
            assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            process.kill()

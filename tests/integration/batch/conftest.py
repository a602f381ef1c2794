"""`cellama batch` in a folder of its own, on one worker for all tests, or on workers that a test may kill."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cellama.api.cli import main
from cellama.api.machine.redis_server import RedisServer

from ...conftest import WorkerProcess, clean_environment

CELLAMA = (sys.executable, "-c", "from cellama.api.cli import main; main()")
ANIMALS = ("fox", "cat", "bear", "frog", "mouse")
StartWorker = Callable[[], WorkerProcess]


def started(folder: Path, url: str, model: str, name: str) -> WorkerProcess:
    """A worker with 8 slots for this model."""
    folder.mkdir()
    models = [{"id": model, "source": "bundled://tiny", "n_parallel": 8, "threads": 1}]
    return WorkerProcess(folder, url, name=name, CELLAMA_MODELS=json.dumps(models)).wait_ready()


@pytest.fixture(scope="package")
def shared_model() -> str:
    return f"m{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="package")
def shared_worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, shared_model: str
) -> Iterator[WorkerProcess]:
    """For tests that leave it alive and idle."""
    worker = started(tmp_path_factory.mktemp("batch") / "worker", redis_server.url, shared_model, shared_model)
    yield worker
    assert worker.stop() == 0, worker.log()


@pytest.fixture
def worker(shared_worker: WorkerProcess) -> WorkerProcess:
    return shared_worker


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """The model of the workers that the test uses."""
    if "start_worker" in request.fixturenames:
        return f"m{uuid.uuid4().hex[:8]}"
    name: str = request.getfixturevalue("shared_model")
    return name


@pytest.fixture
def start_worker(redis_server: RedisServer, tmp_path: Path, model: str) -> Iterator[StartWorker]:
    """Starts workers of this test."""
    workers: list[WorkerProcess] = []

    def start() -> WorkerProcess:
        number = len(workers)
        workers.append(started(tmp_path / f"worker{number}", redis_server.url, model, f"{model}-{number}"))
        return workers[-1]

    yield start
    for worker in workers:
        if worker.process.poll() is None:
            worker.stop()


class Commands:
    """`cellama batch` in a folder of its own."""

    def __init__(self, folder: Path, url: str, model: str) -> None:
        self.folder = folder
        self.output = folder / "out.jsonl"
        self.environment = clean_environment(CELLAMA_REDIS_URL=url)
        self._model = model

    def write(self, lines: list[Any], name: str = "in.jsonl") -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (self.folder / name).write_text("".join(text + "\n" for text in texts))

    def start(self, *argv: str, max_file_bytes: int | None = None) -> subprocess.Popen[str]:
        """Starts the command; none of its files can grow beyond the limit, as on a disk that becomes full."""

        def limit() -> None:
            if max_file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

        with (self.folder / "command.log").open("a") as log:
            return subprocess.Popen(
                [*CELLAMA, "batch", *argv],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                text=True,
                preexec_fn=limit,
            )

    def start_run(self, *more: str, max_file_bytes: int | None = None) -> subprocess.Popen[str]:
        argv = ("run", "in.jsonl", "-o", "out.jsonl", "-m", self._model, "--json", *more)
        return self.start(*argv, max_file_bytes=max_file_bytes)

    def run(self, *more: str) -> int:
        """The exit code of a run of all lines, in this process."""
        return self.call("run", "in.jsonl", "-o", "out.jsonl", "-m", self._model, "--json", *more)

    def call(self, *argv: str) -> int:
        """The exit code of `cellama batch` with these arguments, in this process: a process more shows nothing more."""
        with (
            (self.folder / "command.log").open("a") as log,
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(sys, "argv", ["cellama", "batch", *argv])
            with pytest.raises(SystemExit) as ended:
                main()
        return int(ended.value.code or 0)

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()] if self.output.exists() else []

    def num_results(self) -> int:
        """Return the complete lines of the output. A running or killed run may have written half of the next one."""
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def errors(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "out.errors.jsonl").read_text().splitlines()]

    def log(self) -> str:
        return (self.folder / "command.log").read_text()

    def words(self) -> str:
        """The log without boxes and line breaks."""
        return " ".join(self.log().replace("│", " ").split())

    def end(self) -> dict[str, Any]:
        """The last summary."""
        ends = [json.loads(line) for line in self.log().splitlines() if line.startswith('{"type": "end"')]
        return dict(ends[-1])


@pytest.fixture
def commands(tmp_path: Path, redis_server: RedisServer, model: str) -> Commands:
    return Commands(tmp_path, redis_server.url, model)


def stories(count: int, max_tokens: int = 48) -> list[dict[str, Any]]:
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
    return [
        {"id": f"s{i}", "prompt": f"Once upon a time, there was a little {ANIMALS[i % 5]} {i}", **greedy}
        for i in range(count)
    ]

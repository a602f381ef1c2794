"""Run `cellama up` with separate ports and data."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cellama.api.machine.redis_server import die_with, free_port
from cellama.bench.harness import pace

from ..conftest import MODELS, PATIENCE_S, clean_environment, paced, wait_until
from .containers import in_namespace, send_signal

CELLAMA = [sys.executable, "-c", "from cellama.api.cli import main; main()"]


@dataclass
class Machine:
    """A running `cellama up` with separate ports and data."""

    folder: Path
    environment: dict[str, str]
    flower_port: int
    process: subprocess.Popen[str]
    in_container: bool = False

    def signal(self, number: int) -> None:
        """Send a signal to `cellama up` if it is running."""
        send_signal(self.process, number, in_container=self.in_container)

    def run(self, *argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*CELLAMA, *argv],
            cwd=self.folder,
            env=self.environment,
            input=stdin,
            capture_output=True,
            timeout=PATIENCE_S,
            text=True,
        )

    def output(self) -> str:
        return (self.folder / "up.log").read_text()

    def slowed(self) -> contextlib.AbstractContextManager[None]:
        """Slow down the worker's engine, as `WorkerProcess.slowed` does."""
        return pace.slowed(Path(self.environment[pace.PACE_FILE]))


@contextlib.contextmanager
def up(folder: Path, *more: str, redis_port: int | None = None, in_container: bool = False) -> Iterator[Machine]:
    flower_port = free_port()
    environment = clean_environment(
        CELLAMA_REDIS_URL=f"redis://127.0.0.1:{redis_port or free_port()}/0",
        CELLAMA_DATA_DIR=str(folder / "data"),
        CELLAMA_MODELS=paced(MODELS),
        COLUMNS="120",
    ) | {pace.PACE_FILE: str(folder / "pace")}
    with (folder / "up.log").open("w") as log:
        argv = [*CELLAMA, "up", "--flower-port", str(flower_port), *more]
        argv = in_namespace(argv) if in_container else argv
        process = subprocess.Popen(
            argv, cwd=folder, env=environment, stdout=log, stderr=log, text=True, preexec_fn=die_with(os.getpid())
        )
    machine = Machine(folder, environment, flower_port, process, in_container)
    try:
        wait_until(lambda: "cellama is up" in machine.output() or process.poll() is not None, "cellama up")
        assert process.poll() is None, machine.output()
        yield machine
    finally:
        machine.signal(signal.SIGINT)
        process.wait(PATIENCE_S)

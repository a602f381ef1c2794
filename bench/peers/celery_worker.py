"""Run workers of plain Celery, each in its own process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from cellama.api.machine.redis_server import die_with

END_S = 60.0


@contextlib.contextmanager
def celery_worker(
    app: str, name: str, folder: Path, *options: str, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker for a module's app until the block ends. The worker's log is written to the directory."""
    argv = [sys.executable, "-m", "celery", "-A", app, "worker", "-n", f"{name}@bench", *options]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
            preexec_fn=die_with(os.getpid()),
            cwd=folder,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(END_S)

"""A gateway process for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from cellama.api.machine.redis_server import die_with, free_port

from .conftest import PATIENCE_S, clean_environment, end_process, wait_until

COMMAND = [sys.executable, "-c", "from cellama.api.cli import main; main()", "gateway"]


class GatewayProcess:
    """`cellama gateway` on a free port of loopback."""

    def __init__(self, folder: Path, redis_url: str, port: int = 0, **settings: str) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log_path = folder / "gateway.log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "--port", str(self.port)],
                cwd=folder,
                env=clean_environment(
                    **{"CELLAMA_REDIS_URL": redis_url, "CELLAMA_DATA_DIR": str(folder / "data"), **settings}
                ),
                stdout=log,
                stderr=log,
                preexec_fn=die_with(os.getpid()),
            )

    def wait_ready(self, path: str = "/ready") -> GatewayProcess:
        def answers() -> bool:
            assert self.process.poll() is None, f"the gateway ended:\n{self.log()}"
            try:
                return self.get(path).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(answers, "the gateway")
        return self

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE_S, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=PATIENCE_S, **options)

    def stream(self, path: str, **options: Any) -> AbstractContextManager[httpx.Response]:
        return httpx.stream("POST", self.url + path, timeout=PATIENCE_S, **options)

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def stop(self) -> int:
        """Stop the process; see `end_process`."""
        return end_process(self.process)

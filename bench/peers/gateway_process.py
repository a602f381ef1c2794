"""Run cellama gateways, each in its own process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from .programs import served

COMMAND = "import sys; from cellama.api.cli import main; sys.argv[0] = 'cellama'; main()"


@contextlib.contextmanager
def gateway(port: int, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a gateway for this process's Redis until the block ends. The gateway is ready when the block starts."""
    argv = [sys.executable, "-c", COMMAND, "gateway", "--port", str(port)]
    own = {f"CELLAMA_{name.upper()}": value for name, value in settings.items()}
    with served(argv, {**os.environ, **own}, port, "/ready") as process:
        yield process

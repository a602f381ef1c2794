"""Start Redis and a worker with the bundled model before the tests, and stop both processes afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

import pytest

with socket.create_server(("127.0.0.1", 0)) as free:
    PORT = free.getsockname()[1]
# Set these variables before any test imports your code, because cellama reads its settings on first use.
os.environ["CELLAMA_REDIS_URL"] = f"redis://127.0.0.1:{PORT}/0"
os.environ["CELLAMA_DATA_DIR"] = tempfile.mkdtemp(prefix="cellama-tests-")


@pytest.fixture(scope="session", autouse=True)
def cellama() -> Iterator[None]:
    services = subprocess.Popen(["cellama", "up", "--no-flower"], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not has_ready_model():
            assert services.poll() is None, "cellama up has stopped"
            assert time.monotonic() < deadline, "no model is ready after 60 seconds"
            time.sleep(0.1)
        yield
    finally:
        services.terminate()
        services.wait(60)


def has_ready_model() -> bool:
    from cellama.api import Client, JobError

    try:
        with Client() as client:
            return any(model["status"] == "ready" for model in client.models())
    except JobError:  # Redis doesn't answer yet
        return False

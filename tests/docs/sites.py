"""Start the servers of the examples as their pages describe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..conftest import PATIENCE_S, clean_environment, wait_until
from .pages import DOCS

EXAMPLES = DOCS / "examples"
FORM = {"content-type": "application/x-www-form-urlencoded"}


@contextlib.contextmanager
def started(argv: list[str], folder: Path, log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of an example until the block ends, and print its log if the block fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    redis_url = os.environ["CELLAMA_REDIS_URL"]
    environment = clean_environment(**{"CELLAMA_REDIS_URL": redis_url, "PATH": path, **variables})
    with log.open("wb") as output:
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        yield process
    except BaseException:
        print(log.read_text(errors="replace"))
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


class Site:
    """The web server of an example, which answers when the constructor returns."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        wait_until(lambda: self._answers() or process.poll() is not None, "the web server")
        assert process.poll() is None, "the web server has exited"

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5):
            return True
        return False

    def request(self, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """Return the status and the text of a response. A body that is not a string is sent as JSON."""
        data = body.encode() if isinstance(body, str) else None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", **headers}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the data of server-sent events."""
    return [json.loads(data) for data in re.findall(r"^data: (.*)$", text, re.MULTILINE)]

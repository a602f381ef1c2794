"""Commands on a terminal of their own: what a person sees there, and what a person types."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pytest

from .conftest import PATIENCE_S


class Terminal:
    """A pseudo-terminal with one command on it."""

    def __init__(
        self, argv: Sequence[str], *, folder: Path, environment: Mapping[str, str], columns: int = 80, rows: int = 24
    ) -> None:
        self.output = b""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**environment, "TERM": "xterm-256color"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C works
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    @property
    def text(self) -> str:
        """Everything so far, as it was sent to the terminal."""
        return self.output.decode(errors="replace")

    def send(self, text: str) -> None:
        """Type a text."""
        os.write(self._master, text.encode())

    def wait_for(self, seen: Callable[[str], bool], what: str) -> None:
        """Wait until the text is as wanted. Fails if the command ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while not seen(self.text):
            if time.monotonic() > deadline or not self._read():
                pytest.fail(f"not seen on the terminal: {what}\n{self.text!r}")

    def wait(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read():
            if time.monotonic() > deadline:
                pytest.fail(f"the command did not end\n{self.text!r}")
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """False once the command has closed the terminal."""
        if not select.select([self._master], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # EIO: nobody has the other end
            return False
        self.output += data
        return bool(data)

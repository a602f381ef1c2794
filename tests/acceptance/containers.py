"""Programs as PID 1 of a PID namespace, which is what a container makes of its command."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

Started = subprocess.Popen[bytes] | subprocess.Popen[str]
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def _refusal() -> str:
    """Return why this machine can't start a PID namespace; nothing if it can."""
    try:
        done = subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=30, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


_WHY_NOT = _refusal()
HAS_NAMESPACES = not _WHY_NOT
needs_namespace = pytest.mark.skipif(bool(_WHY_NOT), reason=f"no PID namespace here: {_WHY_NOT}")


def in_namespace(argv: Sequence[str]) -> list[str]:
    """Return the command that runs this one as PID 1 of a new namespace, and exits with its code."""
    return [*UNSHARE, *argv]


def program_of(process: Started) -> psutil.Process:
    """Return the PID 1 of a namespace that `process` started: a signal for `process` itself does not reach it."""
    [program] = psutil.Process(process.pid).children()
    return program


def send_signal(process: Started, number: int, *, in_container: bool) -> None:
    """Send a signal to the program that `process` is, or that it started in a namespace, if that still runs."""
    if process.poll() is None:
        programs = psutil.Process(process.pid).children() if in_container else [psutil.Process(process.pid)]
        for program in programs:
            with contextlib.suppress(psutil.NoSuchProcess):
                program.send_signal(number)


def states_inside(program: psutil.Process) -> dict[int, str]:
    """Return the state of each process of the namespace (Z for a zombie) by the id that it has there."""
    states = {}
    for path in Path(f"/proc/{program.pid}/root/proc").glob("[0-9]*/stat"):
        try:
            states[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return states

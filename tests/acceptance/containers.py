"""Run programs as PID 1 of a PID namespace and as a user without privileges, as containers of the image do."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

Started = subprocess.Popen[bytes] | subprocess.Popen[str]
USER_ID = 1000  # like the first user of an image. Outside the namespace, the files belong to the user of the tests
UNSHARE = [
    "unshare",
    *("--user", f"--map-user={USER_ID}", f"--map-group={USER_ID}"),
    *("--pid", "--fork", "--mount-proc", "--kill-child"),
]


def _refusal() -> str:
    """Return the reason why this machine can't create these namespaces, or "" if it can."""
    try:
        done = subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=30, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


_WHY_NOT = _refusal()
HAS_NAMESPACES = not _WHY_NOT
needs_namespace = pytest.mark.skipif(bool(_WHY_NOT), reason=f"no PID and user namespaces here: {_WHY_NOT}")


def in_namespace(argv: Sequence[str]) -> list[str]:
    """Return a command that runs this command as PID 1 of a new namespace and exits with the same code."""
    return [*UNSHARE, *argv]


def program_of(process: Started) -> psutil.Process:
    """Return PID 1 of the namespace that `process` created. Signals to `process` do not reach this program."""
    [program] = psutil.Process(process.pid).children()
    return program


def send_signal(process: Started, number: int, *, in_container: bool) -> None:
    """Send a signal to a process, or to PID 1 of the namespace that it created. Finished programs are skipped."""
    if process.poll() is None:
        programs = psutil.Process(process.pid).children() if in_container else [psutil.Process(process.pid)]
        for program in programs:
            with contextlib.suppress(psutil.NoSuchProcess):
                program.send_signal(number)


def states_inside(program: psutil.Process) -> dict[int, str]:
    """Return the state of each process in the namespace (Z for a zombie), by its id inside the namespace."""
    states = {}
    for path in Path(f"/proc/{program.pid}/root/proc").glob("[0-9]*/stat"):
        try:
            states[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has exited
    return states

"""Keep child processes running: one that dies is replaced, and all end with their owner."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cellama.tasks.contract.codes import Exit

from .redis_server import die_with

log = logging.getLogger(__name__)

POLL_S = 0.1  # between two looks at the processes
FIRST_BACK_OFF_S, LAST_BACK_OFF_S = 1.0, 30.0  # before a child is started again; it doubles, so a mistake costs little
HEALTHY_S = 60.0  # a child that lived that long is started again without delay


@dataclass
class Child:
    """A process to keep running. Without `log_path` it writes to the output of its owner."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    log_path: Path | None = None
    final_codes: Sequence[int] = (
        Exit.OK,
        Exit.CONFIG,
    )  # a child that exits with one is not started again, and all stop
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    back_off_s: float = 0.0
    starts_again_at: float = 0.0

    def start(self) -> None:
        """Start the process in a session of its own, because Ctrl-C in the terminal is for the owner."""
        output = self.log_path.open("ab") if self.log_path else None
        try:
            self.process = subprocess.Popen(
                self.argv,
                env={**os.environ, **self.env},
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        finally:
            if output is not None:
                output.close()
        self.started_at = time.monotonic()

    def log_tail(self, lines: int = 8) -> str:
        """Return the last lines of its log, or an empty text without one."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def signal(self, number: int) -> None:
        """Send a signal if the process runs."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Runs children until a stop is requested, or one exits that must not be started again."""

    def __init__(self, children: Sequence[Child], kept: Sequence[Child] = ()) -> None:
        """`kept` are replaced like the children, also while those stop, and are started and stopped elsewhere."""
        self.children = children
        self._kept = kept
        self._stops = 0  # how often a stop was requested
        self._wake = threading.Event()

    def start(self) -> None:
        for child in self.children:
            child.start()

    def run(self) -> int:
        """Watch the children. Returns the exit code for the owner."""
        while not self._stops:
            for child in (*self._kept, *self.children):
                code = self._watch(child)
                if code is not None:
                    return code
            self._reap_orphans()
            self._wake.wait(POLL_S)
        return 0

    def _reap_orphans(self) -> None:
        """As PID 1, read the exit codes of processes whose parent exited before them, or they would stay as zombies.

        The codes of children are left to their owner. Orphans after such a child are reaped the next time.
        """
        while os.getpid() == 1 and (ended := _next_ended()) is not None:
            if any(child.process is not None and child.process.pid == ended for child in (*self._kept, *self.children)):
                return
            os.waitpid(ended, 0)

    def _watch(self, child: Child) -> int | None:
        """Replace a dead child. Returns its exit code if it must not be started again."""
        if child.running or child.process is None:
            if child.process is None and time.monotonic() >= child.starts_again_at:
                child.start()
            return None
        code = child.process.returncode
        if code in child.final_codes:
            return code
        lived_s = time.monotonic() - child.started_at
        again = 0.0 if lived_s > HEALTHY_S else min(LAST_BACK_OFF_S, child.back_off_s * 2 or FIRST_BACK_OFF_S)
        child.back_off_s = again
        child.starts_again_at = time.monotonic() + again
        when = f"in {again:.0f} s" if again >= 1 else "now"
        log.warning("%s ended with code %s after %.0f s; it starts again %s", child.name, code, lived_s, when)
        child.process = None
        return None

    def check(self) -> None:
        """Raise KeyboardInterrupt if a stop was requested, so that a caller stops waiting for something else."""
        if self._stops:
            raise KeyboardInterrupt

    def ask_to_stop(self) -> None:
        """End `run`. While `stop` waits, the second call hands running jobs back, and the third one kills."""
        self._stops += 1
        self._wake.set()
        if self._stops > 1:
            for child in self.children:
                child.signal(signal.SIGTERM if self._stops == 2 else signal.SIGKILL)

    def stop(self, timeout_s: float = 600.0) -> None:
        """Stop the children in order, each after it has finished its work, and kill those that take longer."""
        deadline = time.monotonic() + timeout_s
        for child in self.children:
            child.signal(signal.SIGTERM)
            while child.running and time.monotonic() < deadline:
                for kept in self._kept:
                    self._watch(kept)
                self._reap_orphans()
                time.sleep(POLL_S)
            child.signal(signal.SIGKILL)
            if child.process is not None:
                child.process.wait()

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT request a stop within a `with` block."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        self.ask_to_stop()


def _next_ended() -> int | None:
    """Return the id of a child process that has exited and whose exit code is unread. It stays unread."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def worker_argv(name: str) -> list[str]:
    """Return the command of a Celery worker with our pool and queues. `%h` in its name stands for the host."""
    argv = [sys.executable, "-m", "celery", "-A", "cellama.tasks.app", "worker", "-n", name]
    return [*argv, "--without-gossip", "--without-mingle"]


def worker_child(*, log_path: Path | None = None, env: Mapping[str, str] | None = None) -> Child:
    """Return a worker as a child process, with a unique name."""
    return Child("worker", worker_argv(f"cellama-{secrets.token_hex(2)}@%h"), env or {}, log_path)


def flower_child(
    address: str, port: int, *, log_path: Path | None = None, env: Mapping[str, str] | None = None
) -> Child:
    """Return Flower as a child process. Its credentials, if any, are in FLOWER_BASIC_AUTH."""
    argv = [sys.executable, "-m", "cellama.api.machine.flower"]
    return Child("flower", [*argv, f"--address={address}", f"--port={port}"], env or {}, log_path)


def gateway_child(port: int, *, log_path: Path | None = None) -> Child:
    """Return the gateway on a port of loopback as a child process."""
    run = "from cellama.api.cli import main; main()"
    return Child("gateway", [sys.executable, "-c", run, "gateway", f"--port={port}"], {}, log_path)

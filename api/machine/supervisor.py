"""Keep child processes running. Restart children that crash, and stop all children when their owner stops."""

from __future__ import annotations

import contextlib
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

from cellama.config.logging import event_logger
from cellama.tasks.contract.codes import Exit

from .redis_server import die_with

log = event_logger(__name__)

POLL_S = 0.1  # between two checks of the processes
# Seconds before a restart. The delay doubles each time, so that a child that always fails costs little.
MIN_BACK_OFF_S, MAX_BACK_OFF_S = 1.0, 30.0
HEALTHY_S = 60.0  # a child that ran longer is restarted without delay


@dataclass
class Child:
    """A process that the supervisor keeps running. Without `log_path`, the process writes to its owner's output."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    log_path: Path | None = None
    final_codes: Sequence[int] = (Exit.OK, Exit.CONFIG)  # a child that exits with one of these stops all children
    stop_order: int = 0  # children with the smallest number are stopped first, and those with the same number together
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    back_off_s: float = 0.0
    restart_at: float = 0.0

    def start(self) -> None:
        """Start the process in its own session so that only the owner receives Ctrl-C."""
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
        """Return the last lines of the log, or "" if there is no log."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def signal(self, number: int) -> None:
        """Send a signal to the process if it is running."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Runs children until a stop is requested or a child exits with one of its final codes."""

    def __init__(self, children: Sequence[Child], external: Sequence[Child] = ()) -> None:
        """Supervise `children` and `external` processes.

        External processes are restarted even while the children are stopping. The caller starts and stops the external
        processes.
        """
        self.children = children
        self._external = external
        self._num_stops = 0  # how often a stop was requested
        self._wake = threading.Event()

    def start(self) -> None:
        for child in self.children:
            child.start()

    def run(self) -> int:
        """Watch the children until a stop is requested or a child exits with a final code.

        Return the exit code for the owner.
        """
        while not self._num_stops:
            for child in (*self._external, *self.children):
                code = self._watch(child)
                if code is not None:
                    return code
            self._reap_orphans()
            self._wake.wait(POLL_S)
        return 0

    def _reap_orphans(self) -> None:
        """Reap orphaned processes, which would otherwise remain as zombies, if this process is PID 1.

        Exited children are not reaped here because the supervisor needs their exit codes. If the first exited process
        that is found is a child, the next call reaps the remaining orphans.
        """
        while os.getpid() == 1 and (exited := _next_exited()) is not None:
            if any(
                child.process is not None and child.process.pid == exited for child in (*self._external, *self.children)
            ):
                return
            os.waitpid(exited, 0)

    def _watch(self, child: Child) -> int | None:
        """Restart a child that has exited.

        If the exit code is one of the child's final codes, return the code instead.
        """
        if child.running or child.process is None:
            if child.process is None and time.monotonic() >= child.restart_at:
                child.start()
            return None
        code = child.process.returncode
        if code in child.final_codes:
            return code
        ran_s = time.monotonic() - child.started_at
        delay_s = 0.0 if ran_s > HEALTHY_S else min(MAX_BACK_OFF_S, child.back_off_s * 2 or MIN_BACK_OFF_S)
        child.back_off_s = delay_s
        child.restart_at = time.monotonic() + delay_s
        log.warning(
            "child process exited", child=child.name, code=code, ran_s=round(ran_s), restart_in_s=round(delay_s)
        )
        child.process = None
        return None

    def check(self) -> None:
        """Raise KeyboardInterrupt if a stop was requested.

        Code that waits for a child must call this method regularly.
        """
        if self._num_stops:
            raise KeyboardInterrupt

    def request_stop(self) -> None:
        """Make `run` return.

        While `stop` is waiting, a second request makes the children hand back running jobs, and a third request kills
        the children.
        """
        self._num_stops += 1
        self._wake.set()
        if self._num_stops > 1:
            for child in self.children:
                child.signal(signal.SIGTERM if self._num_stops == 2 else signal.SIGKILL)

    def stop(self, timeout_s: float = 600.0) -> None:
        """Stop the children in their `stop_order`, letting them finish their work. Kill children that take too long."""
        deadline = time.monotonic() + timeout_s
        for order in sorted({child.stop_order for child in self.children}):
            stopping = [child for child in self.children if child.stop_order == order]
            for child in stopping:
                child.signal(signal.SIGTERM)
            while any(child.running for child in stopping) and time.monotonic() < deadline:
                for child_of_caller in self._external:
                    self._watch(child_of_caller)
                self._reap_orphans()
                time.sleep(POLL_S)
            for child in stopping:
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
        self.request_stop()


def _next_exited() -> int | None:
    """Return the id of an exited child process without reaping it, or None if no child process has exited."""
    try:
        exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if exited is None else exited.si_pid


def worker_argv(name: str) -> list[str]:
    """Return a worker's command line. In `name`, `%h` stands for the host name."""
    argv = [sys.executable, "-m", "celery", "-A", "cellama.tasks.app", "worker", "-n", name]
    return [*argv, "--without-gossip", "--without-mingle"]


def worker_child(*, log_path: Path | None = None, env: Mapping[str, str] | None = None, name: str = "worker") -> Child:
    """Return a worker as a child process, with a unique name in Celery. `name` is used in messages."""
    suffix = name.removeprefix("worker")  # such as -gpu0
    argv = worker_argv(f"cellama-{secrets.token_hex(2)}{suffix}@%h")
    return Child(name, argv, env or {}, log_path, stop_order=1)


def flower_child(
    address: str, port: int, *, log_path: Path | None = None, env: Mapping[str, str] | None = None
) -> Child:
    """Return Flower as a child process. Flower reads its credentials from FLOWER_BASIC_AUTH."""
    argv = [sys.executable, "-m", "cellama.api.machine.flower"]
    return Child("flower", [*argv, f"--address={address}", f"--port={port}"], env or {}, log_path, stop_order=2)


def gateway_child(port: int, *, log_path: Path | None = None) -> Child:
    """Return the gateway on a loopback port as a child process."""
    run = "from cellama.api.cli import main; main()"
    return Child("gateway", [sys.executable, "-c", run, "gateway", f"--port={port}"], {}, log_path)

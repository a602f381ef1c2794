"""A chat template in a process of its own, which may end without harm when a template takes too much."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from cellama.engine.errors import EngineStopped, InvalidRequest, TemplateFailed
from cellama.engine.system.confined import confine, how_it_ended

CPU_S = 3.0  # of one rendering; usual ones take a millisecond
WALL_S = 30.0  # the same, beside whatever else the machine computes
DATA_BYTES = 512 << 20
MAX_ANSWER_BYTES = 256 << 20
PIPE_BYTES = 1 << 16
_PROGRAM = Path(__file__).with_name("template_process.py")


class TemplateProcess:
    """Asks a process that is started when it is needed, and again after it had to be ended. Safe from any thread.

    One question at a time. The process ends with `close`, and at the latest with this object or this process.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """`setup` is what template_process.py says, but for the limit. Compiles the template. Raises TemplateFailed."""
        self._setup = {**setup, "cpu_s": CPU_S}
        self._lock = threading.Lock()
        self._closed = False
        self._child = self._started()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer. Raises TemplateFailed, InvalidRequest, EngineStopped."""
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the messages or template_args are no JSON: {error}") from None
        with self._lock:
            if self._closed:
                raise EngineStopped("the chat template is unloaded and can't be used any more; load the model again")
            if self._child.is_over:
                self._child = self._started()
            answer = self._child.converse(line)
        if "error" not in answer:
            return answer
        if answer["kind"] == "invalid":
            raise InvalidRequest(answer["error"])
        verb = "refused" if answer["kind"] == "refused" else "failed on"
        raise TemplateFailed(f"the model's chat template {verb} the messages: {answer['error']}")

    def texts_of(self, probes: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
        """The prompts of these conversations; None for those that the template can't render. All of them have the
        time of one. Raises TemplateFailed, EngineStopped."""
        texts: dict[str, str | None] = self.ask({"probes": probes})["texts"]
        return texts

    def close(self) -> None:
        """Ends the process; what is asked after that fails. Idempotent."""
        with self._lock:
            self._closed = True
            self._child.end()

    def _started(self) -> _Child:
        child = _Child()
        answer = child.converse(json.dumps(self._setup).encode() + b"\n")
        if "error" in answer:
            child.end()
            raise TemplateFailed(f"the model's chat template does not compile: {answer['error']}")
        return child


class _Child:
    """The process, and a conversation of lines with it."""

    def __init__(self) -> None:
        """Raises TemplateFailed."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the parent
            )
        except OSError as error:
            raise TemplateFailed(f"the process for the model's chat template does not start: {error}") from None
        self.end = weakref.finalize(self, _end, self._process)
        confine(self._process.pid, data_bytes=DATA_BYTES)

    @property
    def is_over(self) -> bool:
        return not self.end.alive

    def converse(self, line: bytes) -> dict[str, Any]:
        """Writes a line and reads one. Raises TemplateFailed, and ends the process, if it does not answer in time."""
        answered = _exchange(self._process, line, time.monotonic() + WALL_S)
        if answered is None:
            self.end()
            raise TemplateFailed(
                f"the model's chat template took more than {CPU_S:g} s, or too much memory "
                f"({how_it_ended(self._process.returncode)}); send less, or mend the template"
            )
        answer: dict[str, Any] = json.loads(answered)
        return answer


def _exchange(child: subprocess.Popen[bytes], line: bytes, deadline: float) -> bytes | None:
    """Writes a line and reads one; None if the child ends, or does not answer in time."""
    to_child, from_child = (pipe.fileno() for pipe in _pipes(child))
    os.set_blocking(to_child, False)
    unwritten, read = memoryview(line), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(to_child, selectors.EVENT_WRITE)
        selector.register(from_child, selectors.EVENT_READ)
        while not read.endswith(b"\n"):
            ready = [key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
            if not ready or len(read) > MAX_ANSWER_BYTES:
                return None
            if from_child in ready:
                part = os.read(from_child, PIPE_BYTES)
                if not part:
                    return None
                read += part
            elif unwritten := unwritten[_write(to_child, unwritten) :]:
                continue
            else:
                selector.unregister(to_child)
    return bytes(read)


def _write(pipe: int, data: memoryview) -> int:
    """How many bytes went into it; none into one whose reader has gone, which its other end tells of."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        return os.write(pipe, data)
    return 0


def _pipes(child: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert child.stdin is not None
    assert child.stdout is not None
    return child.stdin, child.stdout


def _end(child: subprocess.Popen[bytes]) -> None:
    for pipe in _pipes(child):
        pipe.close()
    child.kill()
    child.wait()

"""A chat template in a process of its own, which may be killed without harm when the template takes too much."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from cellama.engine.errors import EngineStopped, InvalidRequest, TemplateFailed
from cellama.engine.system.confined import confine, how_it_ended

CPU_S = 3.0  # of one rendering; usual ones take a millisecond
WALL_S = 30.0  # of one rendering on a machine that computes other things: ten times the CPU time
DATA_BYTES = 512 << 20  # memory of the process: Python, Jinja and the longest prompt several times
MAX_ANSWER_BYTES = 256 << 20  # two prompts of the maximum length, with each character escaped
_PROGRAM = Path(__file__).with_name("template_process.py")


class TemplateProcess:
    """Asks a process that renders one template, and starts it again after it was killed. Safe from any thread.

    One question at a time. The process ends with `close`, and at the latest with this object or this Python process.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        """Compile the template. `setup` is what template_process.py reads first, without the limit.

        Raises TemplateFailed.
        """
        self._setup = {**setup, "cpu_s": CPU_S}
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. Raises TemplateFailed, InvalidRequest, EngineStopped."""
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the messages or template_args are not valid JSON: {error}") from None
        with self._lock:
            if self._closed:
                raise EngineStopped("the chat template is unloaded and can't be used any more; load the model again")
            if not self._end.alive:
                self._start()
            answer = self._exchange(line)
        if "error" not in answer:
            return answer
        if answer["kind"] == "invalid":
            raise InvalidRequest(answer["error"])
        verb = "refused" if answer["kind"] == "refused" else "failed on"
        raise TemplateFailed(f"the model's chat template {verb} the messages: {answer['error']}")

    def texts_of(self, probes: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
        """Return the prompts of these conversations; None for those that the template can't render.

        All of them together have the time of one. Raises TemplateFailed, EngineStopped.
        """
        texts: dict[str, str | None] = self.ask({"probes": probes})["texts"]
        return texts

    def close(self) -> None:
        """End the process; later questions fail. Idempotent."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
            )
        except OSError as error:
            raise TemplateFailed(f"the process for the model's chat template does not start: {error}") from None
        self._end = weakref.finalize(self, _end, self._process)
        confine(self._process.pid, data_bytes=DATA_BYTES)
        answer = self._exchange(json.dumps(self._setup).encode() + b"\n")
        if "error" in answer:
            self._end()
            raise TemplateFailed(f"the model's chat template does not compile: {answer['error']}")

    def _exchange(self, line: bytes) -> dict[str, Any]:
        """Write a line and read one. Kills the process if it does not answer in time, and raises TemplateFailed."""
        stdin, stdout = _pipes(self._process)
        timer = threading.Timer(WALL_S, self._process.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # a process that has ended gives no answer either
                stdin.write(line)
                stdin.flush()
            answered = stdout.readline(MAX_ANSWER_BYTES)
        finally:
            timer.cancel()
        if not answered.endswith(b"\n"):
            self._end()
            raise TemplateFailed(
                f"the model's chat template took more than {CPU_S:g} s, or too much memory "
                f"({how_it_ended(self._process.returncode)}); send less, or mend the template"
            )
        answer: dict[str, Any] = json.loads(answered)
        return answer


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in _pipes(process):
        with contextlib.suppress(OSError):  # what it did not read is lost
            pipe.close()

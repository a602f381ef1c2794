"""Follow a job until it finishes.

Show the job's position while it is waiting, its text while it is running, and its outcome.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

from cellama.api.client.client import RESULT_TIMEOUT_S, Job, R
from cellama.tasks.contract.errors import JobCancelled, JobFailed, JobTimeout
from cellama.tasks.contract.events import DoneEvent, Event
from cellama.tasks.contract.shapes.results import Timings
from cellama.tasks.estimates.position import Position

from .output import err, print_json, print_warning, printable, write_text

PING_S = 1.0  # between two updates of the position of a job that produces no output


class SilenceTimeout:
    """Limits how long a job may go without producing output.

    Time spent waiting for a slot does not count while a worker is serving the model.
    """

    def __init__(self, job_id: str, patience_s: float, *, allow_unserved: bool = False) -> None:
        """Create the timeout for one job.

        With `allow_unserved`, time spent waiting for a worker that serves the model does not count either.
        """
        self._job_id = job_id
        self._patience_s = patience_s
        self._allow_unserved = allow_unserved
        self._last_event_at = time.monotonic()
        self._num_ahead = -1
        self._moved_at = 0.0  # when the number of jobs ahead last changed

    def note_event(self) -> None:
        """Restart the timeout. Call this method for each event of the job."""
        self._last_event_at = time.monotonic()

    def describe(self, position: Position) -> str:
        """Return the job's state as text. Raises JobTimeout if the job has produced no output for too long."""
        now = time.monotonic()
        if position.state == "waiting" and (position.served or self._allow_unserved):
            self._last_event_at = now
        if now - self._last_event_at > self._patience_s:
            state = "no worker serves its model" if position.state == "waiting" else "it is still running"
            raise JobTimeout(
                f"job {self._job_id} produced no output for {self._patience_s:g} s, and {state}; wait for it with "
                f"`cellama jobs follow {self._job_id}`, or cancel it with `cellama cancel {self._job_id}`"
            )
        if position.state != "waiting":
            return f"job {self._job_id}: processing the prompt …"
        if position.ahead != self._num_ahead:
            self._num_ahead, self._moved_at = position.ahead, now
        return f"job {self._job_id} is waiting: {position.ahead} job(s) ahead, {self._estimate(position, now)}"

    def _estimate(self, position: Position, now: float) -> str:
        """Estimate when the job will get a slot.

        The estimate counts down from the time at which the number of jobs ahead last changed.
        """
        if not position.served:
            return "no worker serves its model"
        if position.eta_s is None:
            return "no estimate yet"
        remaining_s = position.eta_s - (now - self._moved_at)
        return f"about {remaining_s:.0f} s" if remaining_s >= 1 else "soon"


@contextlib.contextmanager
def cancelled_with(job: Job[Any]) -> Iterator[None]:
    """Cancel the job on Ctrl-C, or if the program that reads the output closes the pipe."""
    try:
        yield
    except (KeyboardInterrupt, BrokenPipeError):
        job.cancel()
        err.print(f"\n[yellow]cancelled job {job.id}[/]")
        raise


def result_of(job: Job[R], patience: SilenceTimeout) -> R:
    """Return a job's result without showing its output. Raises the same errors as `show`."""
    with cancelled_with(job):
        for _ in _events(job, patience):
            pass
    return job.result(RESULT_TIMEOUT_S)


def show(job: Job[Any], json: bool, patience: SilenceTimeout) -> str:
    """Stream a job to stdout and return its text. Raises JobTimeout, JobFailed and JobCancelled."""
    text = ""
    for event in _events(job, patience):
        text += event["text"] if event["type"] == "token" else ""
        if json:
            print_json({"job_id": job.id, **event})
        else:
            _show_event(event, job.id)
        _raise_if_failed(event, job.id)
    return text


def _events(job: Job[Any], patience: SilenceTimeout) -> Iterator[Event]:
    """Yield a job's events. Until the next event arrives, show the job's state on stderr."""
    with err.status("…") as spinner:
        spinner.stop()
        for event in job.stream(timeout=math.inf, ping=PING_S):
            if event["type"] == "ping":
                spinner.update(f"[dim]{patience.describe(job.position())}[/]")
                spinner.start()
            else:
                spinner.stop()
                patience.note_event()
                yield event


def _show_event(event: Event, job_id: str) -> None:
    """Write the answer to stdout, and the reasoning and the summary to stderr."""
    if event["type"] == "token":
        write_text(event["text"])
    elif event["type"] == "reasoning":
        text = printable(event["text"]) if err.is_terminal else event["text"]
        err.print(text, style="dim italic", end="", markup=False, highlight=False, soft_wrap=True)
    elif event["type"] == "reasoning_end":
        err.print("\n")
    elif event["type"] == "done":
        for call in event.get("tool_calls", []):
            write_text(f"{call['function']['name']}({call['function']['arguments']})")
        _summarise(event, job_id)
        for warning in event.get("warnings", []):
            print_warning(warning)


def _raise_if_failed(event: Event, job_id: str) -> None:
    if event["type"] == "error":
        raise JobFailed(event["code"], event["message"], event["retryable"])
    if event.get("finish_reason") == "cancelled":
        raise JobCancelled(f"job {job_id} was cancelled")


def _summarise(event: DoneEvent, job_id: str) -> None:
    write_text("\n")
    usage, timings = event["usage"], event.get("timings", Timings())
    parts: list[str] = [f"{usage['completion_tokens']} tokens", event["finish_reason"]]
    if rate := timings.get("generation_rate"):
        parts.append(f"{rate:.0f} tok/s")
    if (ttft_ms := timings.get("ttft_ms")) is not None:
        parts.append(f"first token after {ttft_ms:.0f} ms")
    summary, job = " · ".join(parts), f"job {job_id}"
    between = " · " if len(f"{summary} · {job}") <= err.width else "\n"
    err.print(f"[dim]{summary}{between}{job}[/]", soft_wrap=True)

"""How a command follows a job to its end: it shows the position while nothing comes, the text, and the outcome."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

from cellama.api.client.client import RESULT_AFTER_END_S, Job, R
from cellama.tasks.contract.errors import JobCancelled, JobFailed, JobTimeout
from cellama.tasks.contract.events import DoneEvent, Event
from cellama.tasks.contract.shapes.results import Timings
from cellama.tasks.estimates.position import Position

from .output import err, print_json, print_warning, printable, write_text

PING_S = 1.0  # between two looks at the position of a silent job: about as often as people look


class SilenceTimeout:
    """Limits how long a job may be silent. A job that waits for a slot may be silent forever if a worker serves it."""

    def __init__(self, job_id: str, patience_s: float, *, unserved: bool = False) -> None:
        """`unserved` allows a job to wait until a worker serves it."""
        self._job_id = job_id
        self._patience_s = patience_s
        self._unserved = unserved
        self._heard_at = time.monotonic()
        self._ahead = -1
        self._moved_at = 0.0  # when the number of jobs ahead last changed

    def note_event(self) -> None:
        """Restart the time, because the job has sent an event."""
        self._heard_at = time.monotonic()

    def describe(self, position: Position) -> str:
        """Return where the job is, in words. Raises JobTimeout."""
        now = time.monotonic()
        if position.state == "waiting" and (position.served or self._unserved):
            self._heard_at = now
        if now - self._heard_at > self._patience_s:
            why = "no worker serves its model" if position.state == "waiting" else "it continues"
            raise JobTimeout(
                f"job {self._job_id} produced no output for {self._patience_s:g} s; {why}: `cellama jobs follow "
                f"{self._job_id}` waits longer, `cellama cancel {self._job_id}` ends it"
            )
        if position.state != "waiting":
            return f"job {self._job_id}: the prompt is being processed …"
        if position.ahead != self._ahead:
            self._ahead, self._moved_at = position.ahead, now
        return f"job {self._job_id} waits: {position.ahead} job(s) ahead, {self._when(position, now)}"

    def _when(self, position: Position, now: float) -> str:
        """Return when the job gets a slot. The estimate counts from the last change of the number of jobs ahead."""
        if not position.served:
            return "no worker serves its model"
        if position.eta_s is None:
            return "it is not known yet how long such jobs take"
        left_s = position.eta_s - (now - self._moved_at)
        return f"about {left_s:.0f} s" if left_s >= 1 else "soon"


@contextlib.contextmanager
def cancelled_with(job: Job[Any]) -> Iterator[None]:
    """Cancel the job on Ctrl-C, or if the reader of the output has closed it."""
    try:
        yield
    except (KeyboardInterrupt, BrokenPipeError):
        job.cancel()
        err.print(f"\n[yellow]cancelled job {job.id}[/]")
        raise


def result_of(job: Job[R], patience: SilenceTimeout) -> R:
    """Return the result of a job without showing its output. Raises as `show`."""
    with cancelled_with(job):
        for _ in _events(job, patience):
            pass
    return job.result(RESULT_AFTER_END_S)


def show(job: Job[Any], json: bool, patience: SilenceTimeout) -> str:
    """Stream a job to stdout, and return its text. Raises JobTimeout, JobFailed, JobCancelled."""
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
    """Yield the events of a job. While it is silent, stderr shows where it is."""
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
    """Write the answer to stdout, and reasoning and the summary to stderr."""
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
        parts.append(f"first after {ttft_ms:.0f} ms")
    summary, job = " · ".join(parts), f"job {job_id}"
    between = " · " if len(f"{summary} · {job}") <= err.width else "\n"
    err.print(f"[dim]{summary}{between}{job}[/]", soft_wrap=True)

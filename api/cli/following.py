"""How a command follows a job to its end: where it is while nothing comes, its text, what became of it."""

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

PING_S = 1.0


class SilenceTimeout:
    """How long a job may tell nothing. While it waits its turn it may be silent for ever, if a worker serves it."""

    def __init__(self, job_id: str, patience_s: float, *, unserved: bool = False) -> None:
        """With `unserved`, a job may also wait for a worker that serves it."""
        self._job_id = job_id
        self._patience_s = patience_s
        self._unserved = unserved
        self._heard_at = time.monotonic()
        self._ahead = -1
        self._moved_at = 0.0  # when there were fewer jobs ahead for the last time

    def heard(self) -> None:
        """Of the job itself."""
        self._heard_at = time.monotonic()

    def look(self, position: Position) -> str:
        """Where the job is, in words. Raises JobTimeout."""
        now = time.monotonic()
        if position.state == "waiting" and (position.served or self._unserved):
            self._heard_at = now
        if now - self._heard_at > self._patience_s:
            why = "no worker serves its model" if position.state == "waiting" else "it goes on"
            raise JobTimeout(
                f"job {self._job_id} told nothing for {self._patience_s:g} s; {why}: `cellama jobs follow "
                f"{self._job_id}` waits longer, `cellama cancel {self._job_id}` ends it"
            )
        if position.state != "waiting":
            return f"job {self._job_id}: the prompt is being read …"
        if position.ahead != self._ahead:
            self._ahead, self._moved_at = position.ahead, now
        return f"job {self._job_id} waits: {position.ahead} job(s) ahead, {self._when(position, now)}"

    def _when(self, position: Position, now: float) -> str:
        """The estimate is of the moment in which the last job before this one got its slot."""
        if not position.served:
            return "no worker serves it now"
        if position.eta_s is None:
            return "nothing is known yet of how long such jobs take"
        left_s = position.eta_s - (now - self._moved_at)
        return f"about {left_s:.0f} s" if left_s >= 1 else "soon"


@contextlib.contextmanager
def cancelled_with(job: Job[Any]) -> Iterator[None]:
    """Ctrl-C, or a reader that goes away, cancels the job."""
    try:
        yield
    except (KeyboardInterrupt, BrokenPipeError):
        job.cancel()
        err.print(f"\n[yellow]cancelled job {job.id}[/]")
        raise


def result_of(job: Job[R], patience: SilenceTimeout) -> R:
    """The result of a job of which nothing is shown before. Raises as `show`."""
    with cancelled_with(job):
        for _ in _events(job, patience):
            pass
    return job.result(RESULT_AFTER_END_S)


def show(job: Job[Any], json: bool, patience: SilenceTimeout) -> str:
    """Streams a job to stdout and returns its text. Raises JobTimeout, JobFailed, JobCancelled."""
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
    """A job's events to its end, without pings; while those come, stderr shows where it is."""
    with err.status("…") as spinner:
        spinner.stop()
        for event in job.stream(timeout=math.inf, ping=PING_S):
            if event["type"] == "ping":
                spinner.update(f"[dim]{patience.look(job.position())}[/]")
                spinner.start()
            else:
                spinner.stop()
                patience.heard()
                yield event


def _show_event(event: Event, job_id: str) -> None:
    """The answer goes to stdout, thoughts and the summary to stderr."""
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

"""How a bulk run looks while it goes on, and at its end."""

from __future__ import annotations

import contextlib
import json as json_module
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from cellama.api.batch.options import Summary
from cellama.api.batch.progress import Progress
from cellama.api.cli.output import err, out

LOG_S = 10.0  # between lines where there is no terminal


class _Show:
    """Tells people or machines how a run goes."""

    def __init__(self, bar: Bar | None, events: Console | None) -> None:
        """`events` gets JSON; without it and without a bar, lines are written to stderr."""
        self._bar = bar
        self._events = events
        self._task: TaskID | None = None
        self._next_word = 0.0

    def reading(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task_of(f"reading: {count} lines"), total=None)

    def progress(self, progress: Progress) -> None:
        if self._bar is not None:
            done = progress.finished + progress.failed
            self._bar.update(self._task_of(_words(progress)), completed=done, total=progress.total)
        elif time.monotonic() >= self._next_word:
            self._next_word = time.monotonic() + LOG_S
            if self._events is not None:
                _print_event(self._events, {"type": "progress", **_numbers(progress)})
            else:
                err.print(f"{progress.finished + progress.failed} of {progress.total} lines, {_words(progress)}")

    def _task_of(self, text: str) -> TaskID:
        assert self._bar is not None
        if self._task is None:
            self._task = self._bar.add_task(text, total=None)
        self._bar.update(self._task, description=text)
        return self._task


@contextlib.contextmanager
def showing(json: bool, to_stdout: bool) -> Iterator[_Show]:
    """A bar needs stderr for itself: with results on stdout, errors of lines go there."""
    if json or to_stdout or not err.is_terminal:
        yield _Show(None, _events(to_stdout) if json else None)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=err) as bar:
        yield _Show(bar, None)


def _words(progress: Progress) -> str:
    done = progress.finished + progress.failed - progress.already
    left = progress.left / done * progress.seconds if done else None
    parts = [f"{progress.rate:.0f} tok/s"]
    if left is not None:
        parts.append(f"about {left:.0f} s left")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    return progress.notice or ", ".join(parts)


def _numbers(progress: Progress) -> dict[str, Any]:
    names = (
        "total",
        "finished",
        "failed",
        "in_flight",
        "workers",
        "ahead",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
    )
    values = {name: getattr(progress, name) for name in names}
    return {**values, "rate": round(progress.rate, 1), "seconds": round(progress.seconds, 1), "notice": progress.notice}


def _events(to_stdout: bool) -> Console:
    """Where JSON about the run goes: not between results."""
    return err if to_stdout else out


def _print_event(target: Console, event: dict[str, Any]) -> None:
    target.print(json_module.dumps(event), markup=False, highlight=False, soft_wrap=True)


def summarise(summary: Summary, seconds: float, json: bool, to_stdout: bool) -> None:
    progress = summary.progress
    errors = None if summary.errors is None else str(summary.errors)
    if json:
        facts = {"type": "end", "id": summary.id, "state": summary.state, "errors": errors, **_numbers(progress)}
        _print_event(_events(to_stdout), facts)
        return
    cached = f" ({progress.cached_tokens} of them cached)" if progress.cached_tokens else ""
    err.print(
        f"{summary.state}: {progress.finished} lines done, {progress.failed} failed; {progress.prompt_tokens} prompt "
        f"tokens{cached}, {progress.completion_tokens} generated in {seconds:.1f} s, {progress.rate:.0f} per second"
    )
    if errors and progress.failed:
        err.print(f"[yellow]why lines failed is in {errors}[/]")

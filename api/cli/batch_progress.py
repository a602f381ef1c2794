"""Show a bulk run's progress as a bar, as text lines or as JSON, and print a summary at the end."""

from __future__ import annotations

import contextlib
import json as json_module
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cellama.api.batch.dry_run import DryRun
from cellama.api.batch.options import Progress, Summary

from .output import err, out, printable, readable

LOG_S = 10.0  # between two lines: a run of one day logs fewer than 10,000
MIN_COLUMNS = 80  # minimum width of a terminal that shows both rates


class _Show:
    """Shows a run's progress as a bar, as text lines or as JSON."""

    def __init__(self, bar: Bar | None, events: Console | None) -> None:
        """Write JSON to `events` if `events` is given.

        If neither `bar` nor `events` is given, write text lines to stderr.
        """
        self._bar = bar
        self._events = events
        self._task: TaskID | None = None
        self._next_log = 0.0 if events is not None else time.monotonic() + LOG_S
        self._notice = ""

    def reading(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task_of(f"reading the input: {count} lines"), total=None)

    def progress(self, progress: Progress) -> None:
        if self._bar is not None:
            done = progress.finished + progress.failed
            self._bar.update(self._task_of(_text_of(progress)), completed=done, total=progress.total)
        elif time.monotonic() >= self._next_log or (progress.notice and not self._notice):
            self._next_log, self._notice = time.monotonic() + LOG_S, progress.notice
            if self._events is not None:
                _print_event(self._events, {"type": "progress", **_numbers(progress)})
            else:
                err.print(f"{progress.finished + progress.failed} of {progress.total} lines, {_text_of(progress)}")

    def _task_of(self, text: str) -> TaskID:
        assert self._bar is not None
        if self._task is None:
            self._task = self._bar.add_task(text, total=None)
        self._bar.update(self._task, description=text)
        return self._task


@contextlib.contextmanager
def showing(json: bool, to_stdout: bool) -> Iterator[_Show]:
    """Yield a progress display, which is a bar if stderr is a terminal and stdout receives neither JSON nor results.

    If results are written to stdout, line errors are written to stderr.
    """
    if json or to_stdout or not err.is_terminal:
        yield _Show(None, _events(to_stdout) if json else None)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=err) as bar:
        yield _Show(bar, None)


def _text_of(progress: Progress) -> str:
    parts = _rates(progress) if progress.ended else []
    if err.is_terminal and err.width < MIN_COLUMNS:
        del parts[1:]
    if progress.ended and progress.left:
        parts.append(f"about {progress.left / progress.line_rate:.0f} s left")
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    return progress.notice or ", ".join(parts)


def _rates(progress: Progress) -> list[str]:
    """Return the rate in lines per second, and also in tokens per second if the run generates text."""
    lines = f"{progress.line_rate:.{0 if progress.line_rate >= 10 else 1}f} lines/s"
    return [lines, f"{progress.rate:.0f} tok/s"] if progress.generated else [lines]


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
    rates = {"rate": round(progress.rate, 1), "line_rate": round(progress.line_rate, 1)}
    return {**values, **rates, "seconds": round(progress.seconds, 1), "notice": progress.notice}


def _events(to_stdout: bool) -> Console:
    """Return the console that prints JSON about the run: stdout, or stderr if results are written to stdout."""
    return err if to_stdout else out


def _print_event(target: Console, event: dict[str, Any]) -> None:
    target.print(json_module.dumps(event), markup=False, highlight=False, soft_wrap=True)


def summarise(summary: Summary, json: bool, to_stdout: bool) -> None:
    progress = summary.progress
    errors = None if summary.errors is None else str(summary.errors)
    if json:
        facts = {"type": "end", "id": summary.id, "state": summary.state, "errors": errors, **_numbers(progress)}
        _print_event(_events(to_stdout), facts)
        return
    err.print(_outcome(summary), soft_wrap=True)
    if progress.ended:
        err.print(f"[dim]{' · '.join([f'{progress.seconds:.1f} s', *_rates(progress)])}[/]", soft_wrap=True)
    if progress.prompt_tokens:
        cached = f" ({progress.cached_tokens} cached)" if progress.cached_tokens else ""
        generated = f", {progress.completion_tokens} generated" if progress.completion_tokens else ""
        err.print(f"[dim]tokens: {progress.prompt_tokens} in prompts{cached}{generated}[/]", soft_wrap=True)
    if errors and progress.failed:
        err.print(f"[yellow]errors of failed lines:[/] {escape(errors)}", soft_wrap=True)


def readable_duration(seconds: float) -> str:
    """Format a duration in seconds, minutes, hours or days."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def show_estimate(found: DryRun, output: Path) -> None:
    """Print the estimate of a dry run."""
    samples = "measured on a sample" if found.is_measured else "estimated from their length, because no worker answers"
    tokens = f"{found.prompt_tokens} in prompts ({samples})"
    if found.max_completion_tokens:
        tokens += f", at most {found.max_completion_tokens} generated"
    duration = "unknown, because the workers have not measured a rate yet; run a few rows with --limit first"
    if found.max_seconds is not None:
        rows = " if each row uses its max_tokens" if found.max_completion_tokens else ""
        duration = f"about {readable_duration(found.max_seconds)}{rows}, at the rates that the workers measured last"
    sizes = f"{readable(found.work_bytes)} for {output}.work during the run, at most "
    grid = Table.grid(padding=(0, 2))
    invalid = f", {found.num_invalid} invalid" if found.num_invalid else ""
    facts = {
        "rows": "; ".join([f"{found.num_rows} to run{invalid}", *found.notes]),
        "tokens": tokens,
        "time": duration,
        "disk": sizes + f"{readable(found.output_bytes)} for {output}",
        "first prompt": found.first_prompt,
    }
    for name, value in facts.items():
        grid.add_row(f"[dim]{name}[/]", Text(printable(value)))
    out.print(grid)
    for error in found.errors:
        message = (error.get("error") or {}).get("message", "")
        out.print(f"row {error.get('line')} is invalid: {message}", markup=False, soft_wrap=True)


def _outcome(summary: Summary) -> str:
    progress = summary.progress
    earlier = f" ({progress.finished_before} of them earlier)" if progress.finished_before and progress.ended else ""
    lines = "line" if progress.finished == 1 else "lines"
    counts = f"{progress.finished} {lines} done{earlier}, {progress.failed} failed"
    if summary.state == "completed" and not progress.ended:
        return f"already completed: {counts}"
    if summary.state == "completed" and not progress.finished:
        return f"failed: all {progress.failed} lines failed"
    return f"{summary.state}: {counts}"

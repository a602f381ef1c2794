"""Show a bulk run's progress as a bar, as text lines or as JSON, and print a summary at the end."""

from __future__ import annotations

import contextlib
import json as json_module
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cellama.api.batch.dry_run import DryRun
from cellama.api.batch.options import Progress, Summary

from . import output as terminal  # its consoles are created when something is printed
from .output import printable, readable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar, TaskID

Style = Literal["bar", "text", "json"]
LOG_S = 10.0  # between two lines: a run of one day logs fewer than 10,000
MIN_COLUMNS = 80  # minimum width of a terminal that shows both rates


class _Show:
    """Shows a run's progress as a bar, as text lines or as JSON."""

    def __init__(self, style: Style, events_to: str, opened: contextlib.ExitStack) -> None:
        """Write JSON to the console `events_to`, and other text to stderr. `opened` closes the bar."""
        self._style = style
        self._events_to = events_to
        self._opened = opened
        self._bar: tuple[Bar, TaskID] | None = None
        self._next_log = 0.0 if style == "json" else time.monotonic() + LOG_S
        self._notice = ""

    def reading(self, count: int) -> None:
        if self._style == "bar":
            self._draw(f"reading the input: {count} lines", total=None)

    def progress(self, progress: Progress) -> None:
        if self._style == "bar":
            self._draw(_text_of(progress), completed=progress.finished + progress.failed, total=progress.total)
        elif time.monotonic() >= self._next_log or (progress.notice and not self._notice):
            self._next_log, self._notice = time.monotonic() + LOG_S, progress.notice
            if self._style == "json":
                _print_event(self._events_to, {"type": "progress", **_numbers(progress)})
            else:
                done = progress.finished + progress.failed
                terminal.err.print(f"{done} of {progress.total} lines, {_text_of(progress)}")

    def _draw(self, text: str, **values: Any) -> None:
        """Update the bar, which is created when it is first drawn so that the run can start earlier."""
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeElapsedColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            bar = self._opened.enter_context(Bar(*columns, console=terminal.err))
            self._bar = bar, bar.add_task(text, total=None)
        bar, task = self._bar
        bar.update(task, description=text, **values)


@contextlib.contextmanager
def showing(json: bool, to_stdout: bool) -> Iterator[_Show]:
    """Yield a progress display, which is a bar if stderr is a terminal and stdout receives neither JSON nor results.

    If results are written to stdout, line errors are written to stderr.
    """
    with contextlib.ExitStack() as opened:
        style: Style = "json" if json else "text" if to_stdout or not sys.stderr.isatty() else "bar"
        yield _Show(style, _events_to(to_stdout), opened)


def _text_of(progress: Progress) -> str:
    parts = _rates(progress) if progress.ended else []
    if terminal.err.is_terminal and terminal.err.width < MIN_COLUMNS:
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


def _events_to(to_stdout: bool) -> str:
    """Return the name of the console that prints JSON: stdout, or stderr if results are written to stdout."""
    return "err" if to_stdout else "out"


def _print_event(console: str, event: dict[str, Any]) -> None:
    getattr(terminal, console).print(json_module.dumps(event), markup=False, highlight=False, soft_wrap=True)


def summarise(summary: Summary, json: bool, to_stdout: bool) -> None:
    progress = summary.progress
    errors = None if summary.errors is None else str(summary.errors)
    if json:
        facts = {"type": "end", "id": summary.id, "state": summary.state, "errors": errors, **_numbers(progress)}
        _print_event(_events_to(to_stdout), facts)
        return
    terminal.err.print(_outcome(summary), soft_wrap=True)
    if progress.ended:
        terminal.err.print(f"[dim]{' · '.join([f'{progress.seconds:.1f} s', *_rates(progress)])}[/]", soft_wrap=True)
    if progress.prompt_tokens:
        cached = f" ({progress.cached_tokens} cached)" if progress.cached_tokens else ""
        generated = f", {progress.completion_tokens} generated" if progress.completion_tokens else ""
        terminal.err.print(f"[dim]tokens: {progress.prompt_tokens} in prompts{cached}{generated}[/]", soft_wrap=True)
    if errors and progress.failed:
        from rich.markup import escape

        terminal.err.print(f"[yellow]errors of failed lines:[/] {escape(errors)}", soft_wrap=True)


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
    from rich.table import Table
    from rich.text import Text

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
    terminal.out.print(grid)
    for error in found.errors:
        message = (error.get("error") or {}).get("message", "")
        terminal.out.print(f"row {error.get('line')} is invalid: {message}", markup=False, soft_wrap=True)


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

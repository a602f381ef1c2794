"""`cellama batch`: run, resume."""

from __future__ import annotations

import contextlib
import errno
import json as json_module
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from cellama.api.batch.run import Progress
from cellama.api.batch.start import STANDARD, BatchOptions, Summary, options_of, run_batch

from .batch_runs import redis_here
from .generation import JsonOption
from .options import with_bulk_options
from .output import err, out

LOG_S = 10.0  # between lines where there is no terminal
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
RetryOption = Annotated[bool, typer.Option("--retry-failed", help="Run lines again that have failed.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Results, one JSON object per line; - is stdout.")]


@with_bulk_options
def batch_run_command(
    input: Annotated[Path, typer.Argument(help="JSON lines, text with a prompt per line, CSV or Parquet; - is stdin.")],
    output: OutputOption,
    model: Annotated[str | None, typer.Option("--model", "-m", help="For lines that name none.")] = None,
    format: Annotated[str, typer.Option(help="auto (by the file's name), jsonl, text, csv, parquet.")] = "auto",
    column: Annotated[str | None, typer.Option(help="Of CSV or Parquet: where the prompts are.")] = None,
    id_column: Annotated[
        str | None,
        typer.Option(help="Of CSV or Parquet: where the ids are; default: id, else row numbers."),
    ] = None,
    form: Annotated[str, typer.Option(help="Of the results: auto (as each line came), openai, short.")] = "auto",
    order: Annotated[str, typer.Option(help="Of the results: completion or input.")] = "completion",
    errors: Annotated[Path | None, typer.Option(help="Where failed lines go; default: beside the output.")] = None,
    deadline: Annotated[str | None, typer.Option(help="End the run after so long, for instance 90m or 12h.")] = None,
    merge_identical: Annotated[
        bool, typer.Option("--merge-identical", help="Run identical lines once, if they are greedy or embeddings.")
    ] = False,
    retry_failed: RetryOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew, whatever the output has.")] = False,
    json: JsonOption = False,
    params: dict[str, Any] = {},  # noqa: B006  (filled by the decorator)
) -> None:
    """Run every line of a file; the same command goes on where an earlier one ended.

    Lines: {"prompt": "…"}, {"messages": […]} or {"text": "…"}, with an "id" and parameters; or the OpenAI batch form.

    Example:  cellama batch run questions.jsonl -o answers.jsonl --model tiny --max-tokens 64
    """
    _one_of("--format", format, ("auto", "jsonl", "text", "csv", "parquet"))
    _one_of("--form", form, ("auto", "openai", "short"))
    _one_of("--order", order, ("completion", "input"))
    options = BatchOptions(
        input=input,
        output=output,
        errors=errors,
        format=format,  # type: ignore[arg-type]
        column=column,
        id_column=id_column,
        form=form,  # type: ignore[arg-type]
        ordered=order == "input",
        model=model,
        params=params,
        deadline_s=_seconds(deadline),
        merge_identical=merge_identical,
        retry_failed=retry_failed,
        overwrite=overwrite,
    )
    _run(options, json)


def batch_resume_command(
    output: Annotated[Path, typer.Argument(help="The output of the run.")],
    retry_failed: RetryOption = False,
    json: JsonOption = False,
) -> None:
    """Go on with a run that was interrupted, with the options that it had.

    Example:  cellama batch resume answers.jsonl
    """
    _run(replace(options_of(output), deadline_s=None, retry_failed=retry_failed), json)


def _run(options: BatchOptions, json: bool) -> None:
    started = time.monotonic()
    to_stdout = options.output == STANDARD
    try:
        with redis_here() as redis, _showing(json, to_stdout) as show:
            summary = run_batch(redis, options, show.reading, show.progress)
    except KeyboardInterrupt:
        remedy = f"go on with[/]  cellama batch resume {options.output}"
        err.print(
            "\n[yellow]interrupted and ended; with -o FILE a run can go on[/]"
            if to_stdout
            else f"\n[yellow]interrupted; what is in flight is kept: {remedy}"
        )
        raise
    except BrokenPipeError:
        raise typer.Exit(1) from None  # who reads the results has enough
    except OSError as error:
        hint = (
            "free some room and go on with the same command"
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
            else "correct that and run it again"
        )
        raise OSError(
            f"{error.filename or options.output}: {error.strerror}; {hint}: what was finished is kept"
        ) from None
    _summarise(summary, time.monotonic() - started, json, to_stdout)
    if summary.state != "completed" or summary.progress.failed:
        raise typer.Exit(1)


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
def _showing(json: bool, to_stdout: bool) -> Iterator[_Show]:
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


def _summarise(summary: Summary, seconds: float, json: bool, to_stdout: bool) -> None:
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


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is no time; write for instance 90m or 12h", param_hint="--deadline")
    return float(match[1]) * _SECONDS[match[2]]


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise typer.BadParameter(f"{value!r}; it must be one of {', '.join(known)}", param_hint=flag)

"""`cellama batch`: run, resume."""

from __future__ import annotations

import errno
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cellama.api.batch.options import STANDARD, BatchOptions
from cellama.api.batch.start import options_of, run_batch
from cellama.api.cli.generation import JsonOption
from cellama.api.cli.options import with_bulk_options
from cellama.api.cli.output import called, err
from cellama.tasks import app as celery_app
from cellama.tasks.contract.codes import Exit

from .progress import showing, summarise
from .runs import redis_here

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
RetryOption = Annotated[bool, typer.Option("--retry-failed", help="Run lines again that have failed.")]
MergeOption = Annotated[
    bool, typer.Option("--merge-identical", help="Run identical lines once, if they are greedy or embeddings.")
]
IdColumnOption = Annotated[
    str | None, typer.Option(help="Column of a CSV or Parquet file that has the ids; default: id, else row numbers.")
]
OutputOption = Annotated[
    Path, typer.Option("--output", "-o", help="File for results, a JSON object per line; - is stdout.")
]


@with_bulk_options
def batch_run_command(
    input: Annotated[Path, typer.Argument(help="JSON lines, text with a prompt per line, CSV or Parquet; - is stdin.")],
    output: OutputOption,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model for lines that name none.")] = None,
    format: Annotated[str, typer.Option(help="Input format: auto (by its name), jsonl, text, csv, parquet.")] = "auto",
    column: Annotated[str | None, typer.Option(help="Column of a CSV or Parquet file that has the prompts.")] = None,
    id_column: IdColumnOption = None,
    form: Annotated[str, typer.Option(help="Form of the results: auto (as each line came), openai, short.")] = "auto",
    order: Annotated[str, typer.Option(help="Order of the results: completion, or that of the input.")] = "completion",
    errors: Annotated[Path | None, typer.Option(help="File for failed lines; default: OUT.errors.jsonl.")] = None,
    deadline: Annotated[str | None, typer.Option(help="Time after which the run ends, such as 90m or 12h.")] = None,
    merge_identical: MergeOption = False,
    retry_failed: RetryOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew, whatever the output has.")] = False,
    json: JsonOption = False,
    params: dict[str, Any] = {},  # noqa: B006  (filled by the decorator)
) -> None:
    """Run every line of a file; the same command goes on where an earlier one ended.

    Lines: {"prompt": "…"}, {"messages": […]} or {"text": "…"}, with an "id" and parameters; or the OpenAI batch form.

    Example:  cellama batch run questions.jsonl -o answers.jsonl --model tiny --max-tokens 64
    """
    options = BatchOptions(
        input=input,
        output=output,
        errors=errors,
        format=_one_of("--format", format, ("auto", "jsonl", "text", "csv", "parquet")),
        column=column,
        id_column=id_column,
        form=_one_of("--form", form, ("auto", "openai", "short")),
        ordered=_one_of("--order", order, ("completion", "input")) == "input",
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
    to_stdout = options.output == STANDARD
    try:
        with redis_here() as redis, showing(json, to_stdout) as show:
            summary = run_batch(redis, celery_app, options, show.reading, show.progress)
    except KeyboardInterrupt:
        if to_stdout:
            err.print("\n[yellow]interrupted; a run with -o FILE can be resumed[/]")
        else:
            command = f"{called()} batch resume {shlex.quote(str(options.output))}"
            err.print("\n[yellow]interrupted; what is in flight is kept. Resume with:[/]")
            err.print(f"  {command}", markup=False, soft_wrap=True)
        raise
    except BrokenPipeError:
        raise typer.Exit(Exit.FAILED) from None  # who reads the results has enough
    except OSError as error:
        hint = (
            "free some room and go on with the same command"
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
            else "correct that and run it again"
        )
        raise OSError(
            f"{error.filename or options.output}: {error.strerror}; {hint}: what was finished is kept"
        ) from None
    summarise(summary, json, to_stdout)
    if summary.state != "completed" or summary.progress.failed:
        raise typer.Exit(Exit.FAILED)


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is no time; write for instance 90m or 12h", param_hint="--deadline")
    return float(match[1]) * _SECONDS[match[2]]


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise typer.BadParameter(f"{value!r}; it must be one of {', '.join(known)}", param_hint=flag)
    return value

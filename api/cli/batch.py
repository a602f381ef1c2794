"""`cellama batch`: run and resume bulk runs; list them, show where they are and cancel them from any machine."""

from __future__ import annotations

import contextlib
import errno
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from redis import Redis
from rich.table import Table

from cellama.api.batch.options import STANDARD, BatchOptions
from cellama.api.batch.start import options_of, run_batch
from cellama.tasks import app as celery_app
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.errors import UnknownJob
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.state.bulk_runs import OPEN_STATES, Batches

from .batch_progress import showing, summarise
from .generation import JsonOption
from .options import with_options
from .output import called, err, out, print_error, print_json, readable_time, table_of

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
CONNECT_TIMEOUT_S = 3.0  # a user at a terminal is told soon that Redis is away
ID_SHOWN = 8  # characters of an id: enough to tell apart all runs of 30 days
_WORDS = {
    "validating": "reading its input",
    "in_progress": "running",
    "finalizing": "finishing",
    "cancelling": "stopping",
}
RunArgument = Annotated[str, typer.Argument(help="Id of the run, its first characters, or its output.")]
_NUMBERS = "lines, tokens"


@with_options(ChatJob, without=frozenset({"priority"}))  # a bulk run has the priority of one
def batch_run_command(
    input: Annotated[Path, typer.Argument(help="JSON lines, text with a prompt per line, CSV or Parquet; - is stdin.")],
    output: OutputOption,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model for lines that name none.")] = None,
    format: Annotated[str, typer.Option(help="Input format: auto (by its name), jsonl, text, csv, parquet.")] = "auto",
    column: Annotated[str | None, typer.Option(help="Column of a CSV or Parquet file that has the prompts.")] = None,
    id_column: IdColumnOption = None,
    form: Annotated[str, typer.Option(help="Form of the results: auto (as each line came), openai, short.")] = "auto",
    order: Annotated[str, typer.Option(help="Order of the results: completion or input.")] = "completion",
    errors: Annotated[Path | None, typer.Option(help="File for failed lines (default OUT.errors.jsonl).")] = None,
    deadline: Annotated[str | None, typer.Option(help="Maximum duration of the run, such as 90m or 12h.")] = None,
    merge_identical: MergeOption = False,
    retry_failed: RetryOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start a new run and overwrite the output.")] = False,
    json: JsonOption = False,
    params: dict[str, Any] = {},  # noqa: B006  (filled by the decorator)
) -> None:
    """Run every line of a file. The same command resumes a run that was interrupted.

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
    """Resume a run that was interrupted, with its options.

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
        raise typer.Exit(Exit.FAILED) from None  # the reader of the results has closed the pipe
    except OSError as error:
        hint = (
            "free some space and run the same command again"
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
            else "correct that and run the same command again"
        )
        raise OSError(
            f"{error.filename or options.output}: {error.strerror}; {hint}; finished lines are kept"
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


@contextlib.contextmanager
def redis_here() -> Iterator[Redis]:
    """Connect to the Redis of the settings. Raises RedisUnreachable."""
    with reaching_redis(), connect(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
        redis.ping()
        yield redis


def batch_list_command(json: JsonOption = False) -> None:
    """Show the runs of the last 30 days.

    Example:  cellama batch list
    """
    with redis_here() as redis:
        runs = Batches(redis).all()
    if json:
        print_json(runs)
    elif not runs:
        out.print("no bulk run in the last 30 days; `cellama batch run IN -o OUT` starts one")
    else:
        columns = ("run", "begun", "state", "model", "lines", "tokens", "output")
        table = table_of(*columns, right=_NUMBERS, whole="run, begun, state, lines")
        for run in runs:
            output = "at the gateway" if _is_of_gateway(run) else _from_here(str(run.get("output", "")))
            tokens = str(run.get("completion_tokens", 0))
            failed = f"\n{run['failed']} failed" if run.get("failed") else ""
            table.add_row(*_head(run), _lines(run) + failed, tokens, output)
        out.print(table)


def batch_status_command(run: RunArgument, json: JsonOption = False) -> None:
    """Show the progress of a run.

    Example:  cellama batch status answers.jsonl
    """
    with redis_here() as redis:
        facts = _find(redis, run)
    if json:
        print_json(facts)
        return
    grid = Table.grid(padding=(0, 2))
    for name, value in _facts(facts).items():
        grid.add_row(f"[dim]{name}[/]", value)
    out.print(grid)


def batch_cancel_command(run: RunArgument, json: JsonOption = False) -> None:
    """Cancel a run. Finished lines stay in its output.

    Example:  cellama batch cancel answers.jsonl
    """
    with redis_here() as redis:
        facts = _find(redis, run)
        if facts["state"] not in OPEN_STATES:
            print_error(f"run {facts['id']} has ended: it is {_state(facts)}")
            raise typer.Exit(Exit.FAILED)
        Batches(redis).cancel(str(facts["id"]))
    if json:
        print_json({"id": facts["id"], "cancelled": True})
        return
    who = "gateway" if _is_of_gateway(facts) else "command"
    how = f"its {who} stops it now" if facts["alive"] else f"no {who} worked on it"
    out.print(f"run {facts['id']} is cancelled: {how}; finished lines are in {_output(facts)}", soft_wrap=True)


def _from_here(path: str) -> str:
    """Return a path, relative to the current directory if the file is below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _short(run_id: Any) -> str:
    """Return the first characters of an id. Those of a gateway start with the same prefix, which is added."""
    text = str(run_id)
    return text[: text.find("_") + 1 + ID_SHOWN]


def _is_of_gateway(run: dict[str, Any]) -> bool:
    """Return whether a gateway drives the run. The gateway deletes the files of the run when it has ended."""
    return str(run["id"]).startswith("batch_")


def _output(run: dict[str, Any]) -> str:
    return f"the output file of /v1/batches/{run['id']}" if _is_of_gateway(run) else str(run.get("output"))


def _head(run: dict[str, Any]) -> tuple[str, str, str, str]:
    begun = readable_time(run["created_at"])[5:16] if "created_at" in run else ""  # of the last 30 days
    return _short(run["id"]), begun, _state(run), str(run.get("model") or "")


def _state(run: dict[str, Any]) -> str:
    if run["state"] in OPEN_STATES and not run["alive"]:
        return "interrupted"
    return _WORDS.get(run["state"], str(run["state"]))


def _lines(run: dict[str, Any]) -> str:
    return f"{run.get('finished', 0)} of {run.get('total', 0)}"


def _facts(run: dict[str, Any]) -> dict[str, str]:
    resume = "a gateway" if _is_of_gateway(run) else f"`cellama batch resume {run.get('output')}`"
    resumed = f"; {resume} resumes it" if _state(run) == "interrupted" else ""
    cached = f" ({run['cached_tokens']} of them cached)" if run.get("cached_tokens") else ""
    return {
        "run": str(run["id"]),
        "state": _state(run) + resumed,
        "lines": f"{_lines(run)} done, {run.get('failed', 0)} failed",
        "tokens": f"{run.get('prompt_tokens', 0)} read{cached}, {run.get('completion_tokens', 0)} generated",
        "model": str(run.get("model") or "as the lines say"),
        "input": "the input file of the batch" if _is_of_gateway(run) else str(run.get("input") or "not known"),
        "output": _output(run),
        "begun": readable_time(run["created_at"]) if "created_at" in run else "not known",
        "last word": readable_time(run["at"]),
    }


def _find(redis: Redis, run: str) -> dict[str, Any]:
    runs = Batches(redis).all()
    output = str(Path(run).absolute())
    of_output = [facts for facts in runs if facts.get("output") == output]
    found = of_output[:1] or [facts for facts in runs if run and str(facts["id"]).startswith(run)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(_short(facts["id"]) for facts in found or runs) or "none"
    raise UnknownJob(f"{'several runs begin with' if found else 'no run'} {run!r}; there are: {known}")

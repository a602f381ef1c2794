"""`cellama batch`: run and resume bulk runs on this machine, and list, show and cancel runs on all machines."""

from __future__ import annotations

import contextlib
import errno
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from redis import Redis

from cellama.api.batch.dry_run import dry_run
from cellama.api.batch.formats import Format
from cellama.api.batch.lines import AsKind
from cellama.api.batch.options import BatchOptions
from cellama.api.batch.sources import STANDARD, source_of
from cellama.api.batch.start import completed_run, options_of, run_batch
from cellama.tasks import app as celery_app
from cellama.tasks.connection.connections import CONNECT_TIMEOUT_S, connect
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.errors import InvalidJob, UnknownJob
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.state.bulk_runs import OPEN_STATES, Batches

from . import output as terminal  # its consoles are created when something is printed
from .batch_progress import show_estimate, showing, summarise
from .options import FairnessKeyOption, JsonOption, with_options
from .output import called, print_error, print_json, readable_time, table_of

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
RetryOption = Annotated[bool, typer.Option("--retry-failed", help="Retry failed lines.")]
MergeOption = Annotated[
    bool,
    typer.Option(
        "--merge-identical",
        help="Run identical lines only once. Applies to embeddings, reranking and greedy generations with n = 1.",
    ),
]
IdColumnOption = Annotated[
    str | None,
    typer.Option(help="Column that contains the row ids (default: id or custom_id, otherwise the row numbers)."),
]
OutputOption = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        help="Output file: .jsonl, .csv, .tsv, .parquet or .arrow (.gz and .zst compress text), or - for stdout.",
    ),
]
SHOWN_ID_CHARS = 8  # enough to distinguish all runs of 30 days
_STATE_TEXTS = {
    "validating": "reading its input",
    "in_progress": "running",
    "finalizing": "finishing",
    "cancelling": "stopping",
}
RunArgument = Annotated[str, typer.Argument(help="Run id, a prefix of the run id, or the run's output file.")]
_NUMBERS = "lines, tokens"


@with_options(ChatJob, without=frozenset({"priority"}))  # bulk runs always have the lowest priority
def batch_run_command(
    input: Annotated[
        str,
        typer.Argument(
            help="Input: a file (JSON lines, CSV, TSV, Parquet, Arrow, or text with one prompt per line; .gz and .zst "
            "are decompressed), a directory of text files, a URL such as s3://…, or - for stdin."
        ),
    ],
    output: OutputOption,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model for lines that don't specify a model.")
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            help="Input format: jsonl, text, csv, tsv, parquet, arrow, directory, or auto (based on the file name)."
        ),
    ] = "auto",
    column: Annotated[str | None, typer.Option(help="Column that contains the prompts, or the texts to embed.")] = None,
    template: Annotated[
        str | None,
        typer.Option(help="Prompt template for each row, with column names in braces, for example 'Sum up: {text}'."),
    ] = None,
    as_kind: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Job to run for each row: chat, prompt or embed (default: chat with --system, otherwise prompt).",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message for all chats.")] = None,
    id_column: IdColumnOption = None,
    limit: Annotated[int | None, typer.Option(help="Run only the first N rows.", min=1)] = None,
    sample: Annotated[
        int | None,
        typer.Option(help="Run only N rows sampled from the whole input. Each run samples the same rows.", min=1),
    ] = None,
    form: Annotated[
        str, typer.Option(help="Output format: openai, short, or auto (matches the format of each input line).")
    ] = "auto",
    order: Annotated[
        str, typer.Option(help="Order of the results: completion (as lines finish) or input (as in the input).")
    ] = "completion",
    errors: Annotated[
        Path | None, typer.Option(help="File for the errors from failed lines (default: OUTPUT.errors.jsonl).")
    ] = None,
    fairness_key: FairnessKeyOption = None,
    deadline: Annotated[
        str | None, typer.Option(help="Maximum duration of the run, for example 90m or 12h (default: no limit).")
    ] = None,
    merge_identical: MergeOption = False,
    retry_failed: RetryOption = False,
    keep_work: Annotated[
        bool,
        typer.Option("--keep-work", help="Keep OUTPUT.work so that a later run processes only new and changed rows."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start a new run and overwrite the output.")] = False,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check the input and estimate tokens, time and disk space, without running any lines."
        ),
    ] = False,
    json: JsonOption = False,
    params: dict[str, Any] = {},  # noqa: B006  (filled by the decorator)
) -> None:
    """Run every row of a file as a job. Run the same command again to resume an interrupted run.

    Table rows become chats, prompts or embeddings, and the results are written with the input columns. Each JSON line
    is an object with "prompt", "messages" or "text", and optionally "id" and job parameters. With --column, --template
    or --as, the object's other fields are columns. Lines in OpenAI's batch format are also accepted.

    Example:  cellama batch run in.csv -o out.parquet -m tiny --column review
    """
    if system is not None:
        params = {**params, "system": system}
    options = BatchOptions(
        input=source_of(input),
        output=output,
        errors=errors,
        format=_one_of("--format", format, get_args(Format)),
        column=column,
        template=template,
        as_kind=None if as_kind is None else _one_of("--as", as_kind, get_args(AsKind)),
        id_column=id_column,
        limit=limit,
        sample=sample,
        form=_one_of("--form", form, ("auto", "openai", "short")),
        ordered=_one_of("--order", order, ("completion", "input")) == "input",
        model=model,
        params=params,
        fairness_key=fairness_key,
        deadline_s=_seconds(deadline),
        merge_identical=merge_identical,
        retry_failed=retry_failed,
        keep_work=keep_work,
        overwrite=overwrite,
    )
    if not dry:
        _run(options, json)
        return
    with redis_here() as redis, showing(json, to_stdout=True) as show:
        found = dry_run(redis, celery_app, options, show.reading)
    print_json(asdict(found)) if json else show_estimate(found, output)


def batch_resume_command(
    output: Annotated[Path, typer.Argument(help="The run's output file.")],
    retry_failed: RetryOption = False,
    json: JsonOption = False,
) -> None:
    """Resume an interrupted run with its original options.

    Example:  cellama batch resume answers.jsonl
    """
    try:
        options = options_of(output)
    except InvalidJob:
        with redis_here() as redis:
            done = completed_run(redis, output)
        if done is None:
            raise
        summarise(done, json, to_stdout=False)
        return
    _run(replace(options, deadline_s=None, retry_failed=retry_failed), json)


def _run(options: BatchOptions, json: bool) -> None:
    to_stdout = options.output == STANDARD
    try:
        with redis_here() as redis, showing(json, to_stdout) as show:
            summary = run_batch(redis, celery_app, options, show.reading, show.progress)
    except KeyboardInterrupt:
        if to_stdout:
            terminal.err.print(
                "\n[yellow]interrupted; to be able to resume a run, write its output to a file (-o FILE)[/]"
            )
        else:
            command = f"{called()} batch resume {shlex.quote(str(options.output))}"
            terminal.err.print("\n[yellow]interrupted; workers finish the lines in flight. To resume the run:[/]")
            terminal.err.print(f"  {command}", markup=False, soft_wrap=True)
        raise
    except BrokenPipeError:
        raise typer.Exit(Exit.FAILED) from None  # the program that reads the results has closed the pipe
    except OSError as error:
        hint = (
            "free some space and run the same command again"
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
            else "correct the cause and run the same command again"
        )
        raise OSError(
            f"{error.filename or options.output}: {error.strerror}; finished lines are saved; {hint}"
        ) from None
    summarise(summary, json, to_stdout)
    if summary.state != "completed" or summary.progress.failed:
        raise typer.Exit(Exit.FAILED)


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"invalid duration {text!r}; use, for example, 90m or 12h", param_hint="--deadline")
    return float(match[1]) * _SECONDS[match[2]]


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise typer.BadParameter(f"{value!r} is not supported; use one of {', '.join(known)}", param_hint=flag)
    return value


@contextlib.contextmanager
def redis_here() -> Iterator[Redis]:
    """Yield a connection to the configured Redis. Raises RedisUnreachable."""
    with reaching_redis(), connect(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
        redis.ping()
        yield redis


def batch_list_command(json: JsonOption = False) -> None:
    """List bulk runs from the last 30 days.

    Example:  cellama batch list
    """
    with redis_here() as redis:
        runs = Batches(redis).all()
    if json:
        print_json(runs)
    elif not runs:
        terminal.out.print("no bulk run in the last 30 days; start one with `cellama batch run INPUT -o OUTPUT`")
    else:
        columns = ("run", "started", "state", "model", "lines", "tokens", "output")
        table = table_of(*columns, right=_NUMBERS, whole="run, started, state, lines")
        for run in runs:
            output = "at the gateway" if _is_of_gateway(run) else _relative(str(run.get("output", "")))
            tokens = str(run.get("completion_tokens", 0))
            failed = f"\n{run['failed']} failed" if run.get("failed") else ""
            table.add_row(*_head(run), _lines(run) + failed, tokens, output)
        terminal.out.print(table)


def batch_status_command(run: RunArgument, json: JsonOption = False) -> None:
    """Show a run's progress.

    Example:  cellama batch status answers.jsonl
    """
    with redis_here() as redis:
        facts = _find(redis, run)
    if json:
        print_json(facts)
        return
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for name, value in _facts(facts).items():
        grid.add_row(f"[dim]{name}[/]", value)
    terminal.out.print(grid)


def batch_cancel_command(run: RunArgument, json: JsonOption = False) -> None:
    """Cancel a run. Finished lines stay in the run's output.

    Example:  cellama batch cancel answers.jsonl
    """
    with redis_here() as redis:
        facts = _find(redis, run)
        if facts["state"] not in OPEN_STATES:
            print_error(f"run {facts['id']} has already finished; its state is {_state(facts)}")
            raise typer.Exit(Exit.FAILED)
        Batches(redis).cancel(str(facts["id"]))
    if json:
        print_json({"id": facts["id"], "cancelled": True})
        return
    driver = "gateway" if _is_of_gateway(facts) else "command"
    effect = f"its {driver} is stopping it" if facts["alive"] else f"no {driver} was running it"
    terminal.out.print(f"cancelled run {facts['id']}: {effect}; finished lines are in {_output(facts)}", soft_wrap=True)


def _relative(path: str) -> str:
    """Return a path relative to the current directory if the file is inside it."""
    current = Path.cwd()
    return str(Path(path).relative_to(current)) if Path(path).is_relative_to(current) else path


def _short(run_id: Any) -> str:
    """Return a run's id, shortened to the prefix `batch_`, if present, and the next SHOWN_ID_CHARS characters."""
    text = str(run_id)
    return text[: text.find("_") + 1 + SHOWN_ID_CHARS]


def _is_of_gateway(run: dict[str, Any]) -> bool:
    """Return whether the run is a gateway's batch. The gateway deletes the run's local files when the run ends."""
    return str(run["id"]).startswith("batch_")


def _output(run: dict[str, Any]) -> str:
    return f"the output file of /v1/batches/{run['id']}" if _is_of_gateway(run) else str(run.get("output"))


def _head(run: dict[str, Any]) -> tuple[str, str, str, str]:
    started = readable_time(run["created_at"])[5:16] if "created_at" in run else ""  # without the year
    return _short(run["id"]), started, _state(run), str(run.get("model") or "")


def _state(run: dict[str, Any]) -> str:
    if run["state"] in OPEN_STATES and not run["alive"]:
        return "interrupted"
    return _STATE_TEXTS.get(run["state"], str(run["state"]))


def _lines(run: dict[str, Any]) -> str:
    return f"{run.get('finished', 0)} of {run.get('total', 0)}"


def _facts(run: dict[str, Any]) -> dict[str, str]:
    remedy = (
        "a gateway will resume it"
        if _is_of_gateway(run)
        else f"resume it with `cellama batch resume {run.get('output')}`"
    )
    resume = f"; {remedy}" if _state(run) == "interrupted" else ""
    cached = f" ({run['cached_tokens']} of them cached)" if run.get("cached_tokens") else ""
    return {
        "run": str(run["id"]),
        "state": _state(run) + resume,
        "lines": f"{_lines(run)} done, {run.get('failed', 0)} failed",
        "tokens": f"{run.get('prompt_tokens', 0)} in prompts{cached}, {run.get('completion_tokens', 0)} generated",
        "model": str(run.get("model") or "set by the lines"),
        "input": "the input file of the batch" if _is_of_gateway(run) else str(run.get("input") or "unknown"),
        "output": _output(run),
        "started": readable_time(run["created_at"]) if "created_at" in run else "unknown",
        "last update": readable_time(run["at"]),
    }


def _find(redis: Redis, run: str) -> dict[str, Any]:
    runs = Batches(redis).all()
    output = str(Path(run).absolute())
    of_output = [facts for facts in runs if facts.get("output") == output]
    found = of_output[:1] or [facts for facts in runs if run and str(facts["id"]).startswith(run)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(_short(facts["id"]) for facts in found or runs) or "none"
    raise UnknownJob(f"{'several runs start with' if found else 'unknown run'} {run!r}; runs: {known}")

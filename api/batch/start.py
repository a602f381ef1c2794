"""Start or resume a bulk run. Read the input into the work file, compare it with the output, and run pending lines."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import random
import sqlite3
import sys
import tempfile
import uuid
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from redis import Redis
from redis.exceptions import RedisError

from cellama.config import get_settings
from cellama.tasks.app import CellamaApp
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.fairness import check_fairness_key
from cellama.tasks.state.bulk_runs import Batches
from cellama.tasks.traces.conventions import NAMES
from cellama.tasks.traces.gate import trace_span

from .checks import check_files
from .formats import COLUMNAR, format_of, output_kind
from .lines import BadLine, BatchLine, Defaults, RowMapping, read_lines
from .options import NOT_RESUMED, TOKENS, BatchOptions, Progress, Summary
from .output import LineFile, bad_line, id_of, rewrite_without, usage_of_line
from .rows import InputData, rows_of
from .run import BatchRun, check_model
from .sources import STANDARD, absolute, fingerprint_of, name_of, open_source, source_of
from .tables import write_results
from .templates import RowTemplate
from .work import WorkFile

SAMPLE_SEED = 0  # `--sample` draws the same rows in each command, so that a run can be resumed
LINES_PER_REPORT = 2000  # while the input is read: about ten reports per second


class CheckInput(Protocol):
    """An object that checks an input's lines while they are being read.

    The check may reject the whole input by raising InvalidJob.
    """

    def line(self, number: int, value: dict[str, Any] | BadLine) -> None: ...

    def end(self) -> None: ...


OnRead = Callable[[int], None]
OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Paths:
    """The files of a run."""

    output: Path
    errors: Path
    work: Path


def paths_of(output: Path, errors: Path | None = None) -> Paths:
    """Return a run's files. By default, the error file and the work file are next to the output."""
    return Paths(
        output, errors or output.with_name(f"{output.stem}.errors.jsonl"), output.with_name(output.name + ".work")
    )


def run_batch(
    redis: Redis,
    app: CellamaApp,
    options: BatchOptions,
    on_read: OnRead = lambda count: None,
    on_progress: OnProgress = lambda progress: None,
    check: CheckInput | None = None,
) -> Summary:
    """Start or resume a run, and return when it has finished.

    Raises InvalidJob and OSError. Finished lines are saved even if an error is raised. A run whose output is stdout
    prints results as they arrive, and prints errors to stderr unless an error file is given. A run whose output is
    stdout can't be resumed. `check` may reject the input while it is being read.
    """
    if options.fairness_key is not None:
        check_fairness_key(options.fairness_key)
    check_model(redis, options.model)
    kind = check_files(options)
    to_stdout = options.output == STANDARD
    with _disk_errors(options), contextlib.ExitStack() as opened:
        output = options.output
        if to_stdout:
            output = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="cellama-batch-"))) / "output.jsonl"
        paths = paths_of(output, options.errors)
        if not options.overwrite and (done := completed_run(redis, output, options)) is not None:
            return done
        is_new = options.overwrite or not paths.work.exists()
        work = opened.enter_context(contextlib.closing(open_work(paths, options)))
        opened.enter_context(_recorded(Batches(redis), work.get("run_id"), options, paths))
        error_echo = sys.stderr.fileno() if to_stdout and options.errors is None else None
        try:
            lines = read_input(work, options, paths, on_read, error_echo, check)
        except InvalidJob:
            if is_new:  # no line has been sent
                work.remove()
            raise
        opened.callback(_remove_if_empty, paths.errors)
        errors = opened.enter_context(contextlib.closing(lines))
        echo = sys.stdout.fileno() if to_stdout else None
        results = None
        if kind.is_appended:
            results = opened.enter_context(contextlib.closing(_open_output(work, paths, echo)))
        run = BatchRun(
            redis,
            app,
            work=work,
            output=results,
            output_path=paths.output,
            errors=errors,
            fairness_key=options.fairness_key,
            deadline_s=options.deadline_s,
            ordered=options.ordered and kind.is_appended,
            drops_columns=kind.is_table,
            on_progress=on_progress,
        )
        try:
            with _traced(work):
                state = run.run()
        except BaseException:
            if to_stdout:
                run.abandon()
            raise
        if results is None and run.progress.finished:
            run.progress.notice = f"writing {paths.output.name}"
            on_progress(run.progress)
            format_ = format_of(options.input, options.format)
            is_read_again = format_ in COLUMNAR and kind.format in COLUMNAR
            if is_read_again and _fingerprint(options) != work.get("read_as"):
                raise OSError(errno.ESTALE, "the input has changed since it was read", str(options.input))
            write_results(work, paths.output, kind, options.input, format_)
            run.progress.notice = ""
        _end(run, work, options, paths, state)
        error_file = paths.errors if errors.size and error_echo is None else None
        return Summary(id=run.id, state=state, progress=run.progress, errors=error_file)


def _end(run: BatchRun, work: WorkFile, options: BatchOptions, paths: Paths, state: str) -> None:
    """Report the end of a run, and remove the run's work file if no later command needs it."""
    is_whole = options.limit is None and options.sample is None
    if state == "completed" and is_whole and not run.progress.failed and not options.keep_work:
        made_by = _digest(options, work.get("read_as"))
        run.end(state, made_by=made_by, wrote=fingerprint_of(paths.output))  # before the file that has the same facts
        work.remove()
        return
    run.end(state)
    if state == "completed":
        work.shrink()


def _fingerprint(options: BatchOptions) -> str:
    return options.content or fingerprint_of(options.input)


def _digest(options: BatchOptions, read_as: str) -> str:
    """Return a digest of the options and the input, or "" for an input that can't be compared, such as stdin."""
    values = json.loads(_serialise(replace(options, deadline_s=None, keep_work=False)))
    if options.content:
        del values["input"]  # the name of a temporary file
    return f"sha256:{hashlib.sha256(json.dumps([values, read_as]).encode()).hexdigest()}" if read_as else ""


def completed_run(redis: Redis, output: Path, options: BatchOptions | None = None) -> Summary | None:
    """Return the summary of the completed run that wrote this output, or None if the output has changed since then.

    With `options`, return the summary only if the run had the same options and the same input. A completed run has no
    work file.
    """
    paths = paths_of(output)
    if paths.work.exists() or not output.is_file():
        return None
    with contextlib.suppress(RedisError):
        wrote, made_by = fingerprint_of(output), options and _digest(options, _fingerprint(options))
        for record in Batches(redis).all():
            is_same = record.get("output") == str(output.absolute()) and record.get("wrote") == wrote
            if is_same and (options is None or (made_by and record.get("made_by") == made_by)):
                progress = Progress(**{name: record.get(name, 0) for name in ("total", "finished", "failed", *TOKENS)})
                progress.already = progress.finished + progress.failed
                progress.finished_before, progress.tokens_before = progress.finished, progress.completion_tokens
                return Summary(id=record["id"], state="completed", progress=progress, errors=None)
    return None


@contextlib.contextmanager
def _traced(work: WorkFile) -> Iterator[None]:
    """Trace the run.

    The span of a resumed run is a child of the original run's span.
    """
    parent = {name: text for name in NAMES if (text := work.get(name))}
    with trace_span("batch run", parent) as carrier:
        if not parent:
            work.set(**carrier)
        yield


@contextlib.contextmanager
def _disk_errors(options: BatchOptions) -> Iterator[None]:
    """Raise work file errors as OSError, like output errors."""
    try:
        yield
    except sqlite3.OperationalError as error:
        code = errno.ENOSPC if "full" in str(error) else errno.EIO
        raise OSError(code, str(error), str(paths_of(options.output).work)) from None


@contextlib.contextmanager
def _recorded(batches: Batches, run_id: str, options: BatchOptions, paths: Paths) -> Iterator[None]:
    """Record the run in Redis before its input is read. If the run can't start, restore its previous state."""
    before: dict[str, Any] = {}
    with contextlib.suppress(RedisError):
        before = batches.read(run_id) or {}
        batches.take_cancel(run_id)  # starting it again withdraws an earlier cancellation
        facts = {"input": absolute(options.input), "output": str(paths.output.absolute()), "model": options.model}
        batches.write(run_id, state="validating", **facts)
    try:
        yield
    except (InvalidJob, OSError, sqlite3.OperationalError) as error:
        with contextlib.suppress(RedisError):
            if before:
                batches.write(run_id, state=before["state"])
            elif isinstance(error, InvalidJob):
                batches.forget(run_id)  # no line has been sent
            else:
                batches.write(run_id, state="failed")
        raise


def _remove_if_empty(path: Path) -> None:
    if path.is_file() and not path.stat().st_size:
        path.unlink()


def open_work(paths: Paths, options: BatchOptions) -> WorkFile:
    """Open this output's work file. Raises InvalidJob if the output does not belong to a run."""
    if options.overwrite:
        if paths.work.exists():
            _work_file(paths).close()  # raises if another command uses it
        for path in (paths.output, paths.errors, paths.work):
            path.unlink(missing_ok=True)
    if paths.output.exists() and paths.output.stat().st_size and not paths.work.exists():
        raise InvalidJob(
            f"{str(paths.output)!r} exists, but is not the output of an unfinished run with this input and these "
            f"options ({paths.work.name} is missing); choose another file, or use --overwrite"
        )
    work = _work_file(paths)
    if not work.get("run_id"):
        work.set(run_id=str(uuid.uuid4()))
    return work


def _work_file(paths: Paths) -> WorkFile:
    try:
        return WorkFile(paths.work)
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise InvalidJob(
                f"{str(paths.output)!r} is the output of a running command; wait until it finishes"
            ) from None
        if "unable to open" in str(error) or "readonly" in str(error):
            raise InvalidJob(f"can't write {str(paths.work)!r}: {error}; choose another output") from None
        raise


def read_input(
    work: WorkFile,
    options: BatchOptions,
    paths: Paths,
    on_read: OnRead,
    echo: int | None,
    check: CheckInput | None = None,
) -> LineFile:
    """Add all of the input's lines to the work file. Return the error file, which contains the invalid lines."""
    new_errors = paths.errors.with_name(paths.errors.name + ".part")
    new_errors.unlink(missing_ok=True)
    invalid = LineFile(new_errors, echo)
    try:
        with work.reading():
            work.set(options=_serialise(options), read_as=_fingerprint(options))
            count = 0
            without_model = 0
            for count, line in enumerate(_lines_of(options, check), start=1):
                _add(work, line, options, invalid)
                without_model += isinstance(line, BadLine) and line.lacks_model
                if count % LINES_PER_REPORT == 0:
                    on_read(count)
            if check is not None:
                check.end()
            if count and without_model == count:
                raise InvalidJob("no line has a model; set a model with --model")
            _check_reading(work, count, options, paths)
            work.set(unreadable=invalid.count)
            if options.retry_failed:
                work.retry_failed()
        if paths.errors.exists():
            with contextlib.closing(LineFile(paths.errors)) as earlier:
                failed = (value for value in earlier.lines() if work.has_failed(id_of(value)))
                while page := list(itertools.islice(failed, LINES_PER_REPORT)):
                    invalid.append(page)
    except BaseException:
        new_errors.unlink()
        raise
    finally:
        invalid.close()
    new_errors.replace(paths.errors)
    return LineFile(paths.errors, echo)


def _lines_of(options: BatchOptions, check: CheckInput | None) -> Iterator[BatchLine | BadLine]:
    max_bytes = get_settings().max_payload_bytes
    template = None if options.template is None else RowTemplate(options.template)
    is_table = options.output != STANDARD and output_kind(options.output).is_table
    mapping = RowMapping(options.column, options.id_column, template, options.as_kind, keeps_all=is_table)
    format_ = format_of(options.input, options.format)
    chosen = _chosen(options)
    with _opened(options) as data:
        defaults = Defaults(options.model, options.params)
        check_line = (lambda number, value: None) if check is None else check.line
        lines = read_lines(data, format_, defaults, max_bytes, mapping, check_line, chosen)
        yield from itertools.islice(lines, options.limit)


@contextlib.contextmanager
def _opened(options: BatchOptions) -> Iterator[InputData]:
    """Yield the opened input. Columnar files and directories are opened later, so only their path or URL is yielded."""
    if format_of(options.input, options.format) in (*COLUMNAR, "directory") and options.input != STANDARD:
        yield options.input
        return
    with open_source(options.input) as stream:
        yield stream


def _chosen(options: BatchOptions) -> Container[int] | None:
    """Return the indexes of the rows that `--sample` selects, or None for all rows.

    This function reads the whole input.
    """
    if options.sample is None:
        return None
    with _opened(options) as data:
        rows = rows_of(data, format_of(options.input, options.format), get_settings().max_payload_bytes)
        count = sum(1 for _ in rows)
    return set(random.Random(SAMPLE_SEED).sample(range(count), min(count, options.sample)))


def _check_reading(work: WorkFile, count: int, options: BatchOptions, paths: Paths) -> None:
    """Raise InvalidJob if the input is empty or does not belong to the output."""
    name = name_of(options.input)
    if not count:
        raise InvalidJob(f"{name} has no lines; check that it is the right file")
    if (options.limit or options.sample) and work.drops_results():
        raise InvalidJob(
            f"{str(paths.output)!r} contains results of rows that --limit or --sample excludes; choose another output, "
            "or remove the option"
        )
    if not work.keeps_results():
        raise InvalidJob(
            f"{str(paths.output)!r} contains results of another run, which match no line of {name} with these "
            "parameters; choose another output, or use --overwrite to delete these results"
        )


def _add(work: WorkFile, line: BatchLine | BadLine, options: BatchOptions, invalid: LineFile) -> None:
    if isinstance(line, BatchLine):
        if options.form != "auto":
            line = replace(line, form=options.form)
        if options.output != STANDARD and output_kind(options.output).is_table:
            line = replace(line, form="short")
        earlier = work.add(line, merge=options.merge_identical and line.is_repeatable)
        if earlier is None:
            return
        message = f"id is {line.id!r}, as in line {earlier}; ids must be unique"
        line = BadLine(number=line.number, id=line.id, message=message, columns=line.columns)
    invalid.append([bad_line(options.form, line)])


def _open_output(work: WorkFile, paths: Paths, echo: int | None) -> LineFile:
    """Open the output. Remove results of changed lines, and record results that are not yet in the work file."""
    output = LineFile(paths.output, echo)
    if work.is_outdated():  # a crash at any point is safe, because the next command repeats this
        output.close()
        work.set(output_size=0)
        rewrite_without(paths.output, work.is_outdated)
        output = LineFile(paths.output, echo)
    known = int(work.get("output_size", "0"))
    if output.size < known:
        output.close()
        raise InvalidJob(
            f"{str(paths.output)!r} no longer contains all results of this run; restore the file, or use --overwrite"
        )
    with work.transaction():
        _recover(work, output, known)
        work.forget_outdated()
        work.set(output_size=output.size)
    return output


def _recover(work: WorkFile, output: LineFile, start: int) -> None:
    """Mark lines as finished if their results are in the output after byte `start`.

    After a crash, the output may contain results of lines that are not yet marked as finished.
    """
    tokens = {name: int(work.get(name, "0")) for name in TOKENS}
    for value in output.lines(start):
        if work.finish_by_id(id_of(value)):
            for name, count in usage_of_line(value).items():
                tokens[name] += count
    work.set(**tokens)
    work.find_twins()


def _serialise(options: BatchOptions) -> str:
    values = {name: getattr(options, name) for name in BatchOptions.__slots__ if name not in NOT_RESUMED}
    values |= {name: absolute(value) for name, value in values.items() if isinstance(value, Path)}
    return json.dumps(values)


def options_of(output: Path) -> BatchOptions:
    """Return the original options of the run that wrote this output. Raises InvalidJob."""
    paths = paths_of(output)
    if not paths.work.exists():
        raise InvalidJob(
            f"{str(output)!r} is not the output of a run, because {paths.work.name} is missing; choose another file"
        )
    with contextlib.closing(WorkFile(paths.work)) as work:
        values = json.loads(work.get("options", "{}"))
    if "input" not in values:
        raise InvalidJob(
            f"the run of {str(output)!r} stopped before its input was read; start it again with `cellama batch run`"
        )
    if values.get("input") == str(STANDARD):
        raise InvalidJob(
            "the input of this run came from stdin; to resume it, pass the same lines to "
            "`cellama batch run - -o OUTPUT`"
        )
    if values.get("content"):
        raise InvalidJob("the rows of this run were passed from Python; to resume it, call `Client.batch` again")
    values["input"] = source_of(values["input"])
    if values.get("errors"):
        values["errors"] = Path(values["errors"])
    return BatchOptions(output=output, **values)

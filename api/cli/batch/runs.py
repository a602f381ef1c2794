"""`cellama batch`: list, status, cancel, from any machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from redis import Redis
from rich.table import Table

from cellama.api.cli.generation import JsonOption
from cellama.api.cli.output import out, print_error, print_json, readable_time, table_of
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.errors import UnknownJob
from cellama.tasks.state.bulk_runs import OPEN_STATES, Batches

CONNECT_TIMEOUT_S = 3.0
ID_SHOWN = 8  # characters
_WORDS = {"validating": "reading its input", "in_progress": "running", "finalizing": "ending", "cancelling": "ending"}
RunArgument = Annotated[str, typer.Argument(help="Id of the run, its first characters, or its output.")]


@contextlib.contextmanager
def redis_here() -> Iterator[Redis]:
    """The Redis of the settings, which answers."""
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
        out.print("no bulk run in the last 30 days; `cellama batch run IN -o OUT` begins one")
    else:
        columns = ("run", "begun", "state", "model", "lines", "tokens", "output")
        table = table_of(*columns, right=_NUMBERS, whole="run, begun, state, lines")
        for run in runs:
            output = "at the gateway" if _is_of_gateway(run) else _from_here(str(run.get("output", "")))
            tokens = str(run.get("completion_tokens", 0))
            failed = f"\n{run['failed']} failed" if run.get("failed") else ""
            table.add_row(*_head(run), _lines(run) + failed, tokens, output)
        out.print(table)


_NUMBERS = "lines, tokens"


def batch_status_command(run: RunArgument, json: JsonOption = False) -> None:
    """Show where a run is.

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
    """End a run; finished lines stay in its output.

    Example:  cellama batch cancel answers.jsonl
    """
    with redis_here() as redis:
        facts = _find(redis, run)
        if facts["state"] not in OPEN_STATES:
            print_error(f"run {facts['id']} has ended already: it is {_state(facts)}")
            raise typer.Exit(Exit.FAILED)
        Batches(redis).cancel(str(facts["id"]))
    if json:
        print_json({"id": facts["id"], "cancelled": True})
        return
    who = "gateway" if _is_of_gateway(facts) else "command"
    how = f"its {who} ends it now" if facts["alive"] else f"no {who} worked on it"
    out.print(f"run {facts['id']} is cancelled: {how}; finished lines are in {_output(facts)}", soft_wrap=True)


def _from_here(path: str) -> str:
    """A path, relative to the current directory if the file is below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _short(run_id: Any) -> str:
    """Characters that tell runs apart: ids of a gateway all begin alike."""
    text = str(run_id)
    return text[: text.find("_") + 1 + ID_SHOWN]


def _is_of_gateway(run: dict[str, Any]) -> bool:
    """Whether a gateway drives it. Its files are where the gateway works, and go from there when it has ended."""
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
    resumed = f"; {resume} goes on with it" if _state(run) == "interrupted" else ""
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

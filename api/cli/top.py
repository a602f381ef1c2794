"""The command top: queues, models and workers on one screen, with what is late first and in colour."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cellama.api.client.client import Client
from cellama.tasks.contract.errors import RedisRefused, RedisUnreachable
from cellama.tasks.contract.names import CLASSES

from .output import out, table_of

LATE_S, VERY_LATE_S = 10.0, 60.0  # estimates from here on are yellow, red: a person gets impatient
FULL, VERY_FULL = 0.8, 0.95  # fractions of slots or KV cells in use that are yellow, red
STALE_S = 4.0  # without a heartbeat, which comes every 2 s: the worker is stuck, or has lost Redis
FIXED_LINES = 21  # titles, heads, rules and captions of three tables, and the totals
LEAST_ROWS = 1  # per table, on a terminal that is too low
QUEUE_COLUMNS = ("queue", *CLASSES, "oldest", *(f"new {name}" for name in CLASSES))
Seen = TypeVar("Seen")


def top_command(
    every: Annotated[float, typer.Option(min=0.2, max=60.0, help="Refresh interval in seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the screen once, and exit.")] = False,
) -> None:
    """Watch queues, models and workers on one screen, with the latest first. Ctrl-C exits.

    Example:  cellama top --every 2
    """
    with Client() as client:
        if once:
            out.print(_shown(look(client), None))
        else:
            watch_all(client, every)


def watch_all(client: Client, every_s: float) -> None:
    """Show the screen until Ctrl-C."""
    watch(partial(look, client), _shown, every_s, whole=True)


def look(client: Client) -> dict[str, Any]:
    """Return what the screen shows. Raises RedisUnreachable, RedisRefused."""
    workers = [asdict(worker) for worker in client.workers()]
    return {**client.stats(), "live": workers, "dead": client.dead()}


def _shown(seen: dict[str, Any], problem: str | None) -> RenderableType:
    return screen(seen, problem, out.height)


def screen(seen: dict[str, Any], problem: str | None, height: int) -> RenderableType:
    """Return the screen in `height` lines."""
    rows = max(LEAST_ROWS, (height - FIXED_LINES) // 4)  # three tables, and errors
    parts: list[RenderableType] = [_head(seen)]
    if problem is not None:
        parts.append(f"[red]{escape(problem)}; retrying …[/]")
    waiting = queues(seen, rows)
    parts.append(waiting if waiting.row_count else "\n [dim]no job waits[/]\n")
    return Group(*parts, models(seen, rows), workers(seen, rows), *_last_errors(seen, rows))


def _head(seen: dict[str, Any]) -> str:
    totals, num = seen["totals"], seen["workers"]
    dead = f", [red]{len(seen['dead'])} dead jobs[/]" if seen["dead"] else ""
    live = f"{num} worker(s)" if num else "[red]no worker lives[/]"
    looked = totals["cache_hits"] + totals["cache_misses"]
    hits = f"{100 * totals['cache_hits'] / looked:.0f} %" if looked else "-"
    return (
        f"{live}, slots: {totals['slots_busy']}/{totals['slots_total']}, "
        f"tok/s: {totals['prompt_rate']:.0f} prompt, {totals['generation_rate']:.0f} generated, hits: {hits}{dead}"
    )


def queues(seen: dict[str, Any], most: int) -> Table:
    """Return the models with jobs: first those without a worker, then by the longest estimate and the oldest job.

    A row has the estimates of both classes, because a new urgent job does not wait for the bulk work before it.
    """
    unserved = seen["unserved"]
    names = [model for model in seen["classes"] if seen["waiting"][model] or _foreign(seen, model)]
    names.sort(
        key=lambda model: (model not in unserved, *(-value for value in _longest(seen["classes"][model])), model)
    )
    table = table_of(*QUEUE_COLUMNS, right=", ".join(QUEUE_COLUMNS[1:]))
    for model in names[:most]:
        classes, foreign = seen["classes"][model], _foreign(seen, model)
        label = escape(model) + (f" [dim](+{foreign} from plain Celery)[/]" if foreign else "")
        counts = [str(classes[name]["waiting"]) for name in CLASSES]
        oldest = _late(_longest(classes)[1]) if seen["waiting"][model] else "?"
        waits = ["[red]no worker[/]" if model in unserved else _late(classes[name]["eta_s"]) for name in CLASSES]
        table.add_row(label, *counts, oldest, *waits)
    return _rest(table, names, most)


def _longest(classes: dict[str, Any]) -> tuple[float, float]:
    """Return the longest estimate and the longest wait so far, in seconds, of the classes that have jobs."""
    having = [told for told in classes.values() if told["waiting"]]
    return max((told["eta_s"] or 0.0 for told in having), default=0.0), max(
        (t["oldest_s"] for t in having), default=0.0
    )


def _foreign(seen: dict[str, Any], model: str) -> int:
    """Return how many messages of an unserved model are not jobs yet, because no worker has seen them."""
    return max(0, seen["queues"][model] - seen["waiting"][model]) if model in seen["unserved"] else 0


def _late(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return _coloured(f"{seconds:.1f} s", seconds, LATE_S, VERY_LATE_S)


def models(seen: dict[str, Any], most: int) -> Table:
    """Return the models of each worker, the busiest first."""
    found = [(worker, model) for worker in seen["live"] for model in worker["models"]]
    found.sort(key=lambda pair: (-_busy(pair[1]), pair[1]["id"], pair[0]["name"]))
    table = table_of("model", "worker", "slots", "wait", "tok/s", "KV", "hits", "lost slots", "errors", right=(
        "slots, wait, tok/s, KV, hits, lost slots, errors"))  # fmt: skip
    for worker, model in found[:most]:
        table.add_row(escape(model["id"]), escape(worker["name"]), *_cells(model))
    return _rest(table, found, most)


def _busy(model: dict[str, Any]) -> float:
    engine = model["engine"]
    if engine is None:
        return 0.0
    slots = engine["slots_prefilling"] + engine["slots_decoding"] + engine["requests_waiting"]
    return float(slots / max(1, engine["slots_total"]))


def _cells(model: dict[str, Any]) -> tuple[str, ...]:
    engine = model["engine"]
    if engine is None:
        parts = [model[name] for name in ("embedder", "reranker") if model[name] is not None]
        waiting, rate, failed = (
            sum(part[name] for part in parts) for name in ("requests_waiting", "prompt_rate", "requests_failed")
        )
        return (model["status"], str(waiting), f"{rate:.0f}", "-", "-", "-", _errors(failed))
    busy, total = engine["slots_prefilling"] + engine["slots_decoding"], engine["slots_total"]
    kv = engine["kv_used_tokens"] / max(1, engine["kv_total_tokens"])
    looked = engine["cache_hits"] + engine["cache_misses"]
    return (
        _coloured(f"{busy}/{total}", busy / max(1, total), FULL, 2.0),
        _coloured(str(engine["requests_waiting"]), engine["requests_waiting"], 1, 2 * total + 1),
        f"{engine['generation_rate']:.0f}",
        _coloured(f"{100 * kv:.0f} %", kv, FULL, VERY_FULL),
        f"{100 * engine['cache_hits'] / looked:.0f} %" if looked else "-",
        str(engine["preemptions"]),
        _errors(engine["requests_failed"]),
    )


def _errors(count: int) -> str:
    return f"[red]{count}[/]" if count else "0"


def workers(seen: dict[str, Any], most: int) -> Table:
    """Return the workers, first those that were not seen for the longest time."""
    live = sorted(seen["live"], key=lambda worker: (-int(worker["age_s"] / STALE_S), worker["name"]))
    table = table_of("worker", "pool", "seen", "cores", "missing models", right="seen, cores")
    for worker in live[:most]:
        lacks = ", ".join(thing["model"] for thing in worker["wanted"] if thing["state"] == "lacking")
        age_s, uses = worker["age_s"], worker["cores"]["uses"]
        told = _coloured(f"{age_s:.1f} s ago", age_s, STALE_S, 2 * STALE_S)
        missing = f"[red]{escape(lacks)}[/]" if lacks else ""
        table.add_row(escape(worker["name"]), escape(worker["pool"]), told, f"{uses:.1f}", missing)
    return _rest(table, live, most)


def _last_errors(seen: dict[str, Any], most: int) -> list[str]:
    """Return why models could not be loaded recently, and the last dead jobs, one line each."""
    lacking = [
        f"[yellow]{escape(worker['name'])}: {escape(name)}: {escape(failure['message'].partition(chr(10))[0])}[/]"
        for worker in seen["live"]
        for name, failure in worker["failures"].items()
    ]
    dead = [
        f"[red]dead: {escape(job['id'])} in {escape(job['queue'])}, {job['attempts']} attempts, "
        f"the last on {escape(job['last_worker'])}[/]"
        for job in seen["dead"]
    ]
    return [*lacking, *dead][:most]


def _rest(table: Table, rows: list[Any], most: int) -> Table:
    if len(rows) > most:
        table.caption = f"{len(rows) - most} more"
    return table


def _coloured(text: str, value: float, high: float, very_high: float) -> str:
    colour = "red" if value >= very_high else "yellow" if value >= high else ""
    return f"[{colour}]{text}[/]" if colour else text


def watch(
    look: Callable[[], Seen], render: Callable[[Seen, str | None], RenderableType], every_s: float, *, whole: bool
) -> None:
    """Show what `look` returns in each interval. While Redis does not answer, the last view stays with the problem.

    With `whole` it takes the whole terminal. Raises what the first call of `look` raises.
    """
    with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
        seen, problem = look(), None
        with Live(console=out, screen=whole and out.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(render(seen, problem), refresh=True)
                time.sleep(every_s)
                try:
                    seen, problem = look(), None
                except (RedisUnreachable, RedisRefused) as error:
                    problem = str(error)

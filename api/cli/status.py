"""The commands `status` and `top`, which show workers, models and queues. `status` can also show a single job."""

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

from .options import JsonOption
from .output import NO_WORKERS, out, plural, print_json, printable, readable, table_of
from .tenants import tenant_table

WATCH_S = 1.0  # between two updates of `status --watch`; workers report every 2 s
LATE_S, VERY_LATE_S = 10.0, 60.0  # waiting times from which a value is yellow or red
FULL, VERY_FULL = 0.8, 0.95  # fractions of slots or KV cells in use from which a value is yellow or red
STALE_S = 4.0  # two heartbeat intervals, after which the worker probably hangs or has lost Redis
FIXED_LINES = 21  # lines of `top` for the titles, headers, rules and captions of three tables, and for the totals
SHARE_LINES = 6  # lines of `top` for the same parts of the table of tenants
MIN_ROWS = 1  # rows in each table of `top` if the terminal is too small
QUEUE_COLUMNS = ("queue", *CLASSES, "oldest", *(f"new {name}" for name in CLASSES))
EMBED_FIELDS = ("requests_waiting", "prompt_rate", "requests_finished", "requests_failed")
HITS = {"slot": "in their slot", "copy": "from another slot", "ram": "from RAM", "disk": "from disk"}
View = TypeVar("View")


def status_command(
    job_id: Annotated[
        str | None, typer.Argument(help="Show the state and estimated start time of the job with this id.")
    ] = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
) -> None:
    """Show workers, models, slots, queues and token rates, or the state of one job.

    Without a job, --watch is the same as `cellama top`.

    Example:  cellama status
    """
    with Client() as client:

        def read() -> dict[str, Any]:
            return asdict(client.position(job_id)) if job_id else read_status(client)

        if json:
            print_json(read())
        elif not watch:
            out.print(_render_position(read()) if job_id else render_status(read()))
        elif job_id:
            _watch(read, _render_watched_position, WATCH_S, full_screen=False)
        else:
            _watch_screen(client, WATCH_S)


def top_command(
    every: Annotated[float, typer.Option(min=0.2, max=60.0, help="Refresh interval in seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the screen once and exit.")] = False,
) -> None:
    """Watch queues, tenants, models and workers on one screen, sorted so that the slowest and busiest come first.

    Ctrl-C exits.

    Example:  cellama top --every 2
    """
    with Client() as client:
        if once:
            out.print(_render_screen(read_screen(client), None))
        else:
            _watch_screen(client, every)


def read_status(client: Client) -> dict[str, Any]:
    """Return the data that `status` shows. Raises RedisUnreachable or RedisRefused."""
    return {**client.stats(), "live": [asdict(worker) for worker in client.workers()]}


def read_screen(client: Client) -> dict[str, Any]:
    """Return the data that `top` shows. Raises RedisUnreachable or RedisRefused."""
    return {**read_status(client), "dead": client.dead(), "tenants": client.tenants()}


def _watch_screen(client: Client, every_s: float) -> None:
    _watch(partial(read_screen, client), _render_screen, every_s, full_screen=True)


def _watch(
    read: Callable[[], View],
    render: Callable[[View, str | None], RenderableType],
    every_s: float,
    *,
    full_screen: bool,
) -> None:
    """Call `read` repeatedly and show its result until Ctrl-C.

    While Redis does not answer, show the last result and the problem. Raises the errors of the first call to `read`.
    """
    with contextlib.suppress(KeyboardInterrupt):
        view, problem = read(), None
        with Live(console=out, screen=full_screen and out.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(render(view, problem), refresh=True)
                time.sleep(every_s)
                try:
                    view, problem = read(), None
                except (RedisUnreachable, RedisRefused) as error:
                    problem = str(error)


# Cells that both commands show


def _hit_rate(counts: dict[str, Any]) -> str:
    """Return the share of prompts for which the cache contained a prefix."""
    looked_up = counts["cache_hits"] + counts["cache_misses"]
    return f"{100 * counts['cache_hits'] / looked_up:.0f} %" if looked_up else "-"


def _busy_slots(engine: dict[str, Any]) -> int:
    return int(engine["slots_prefilling"] + engine["slots_decoding"])


def _embedding_counts(model: dict[str, Any]) -> dict[str, Any] | None:
    """Return a model's embedding and reranking job counts, or None if the model neither embeds nor reranks."""
    parts = [model[name] for name in ("embedder", "reranker") if model[name] is not None]
    return {name: sum(part.get(name, 0) for part in parts) for name in EMBED_FIELDS} if parts else None


def _coloured(text: str, value: float, high: float, very_high: float) -> str:
    colour = "red" if value >= very_high else "yellow" if value >= high else ""
    return f"[{colour}]{text}[/]" if colour else text


# The output of `status`


def render_status(status: dict[str, Any]) -> RenderableType:
    """Return one table per worker, followed by the totals and the queues."""
    if status["live"]:
        tables = map(_worker_status, status["live"])
        return Group(*tables, *_totals(status["totals"], status["age_s"]), *_queue_lines(status))
    return Group(NO_WORKERS, *_queue_lines(status))


def _worker_status(worker: dict[str, Any]) -> RenderableType:
    """Return a table of a worker's models that fits in 80 columns."""
    pool = "" if worker["pool"] == "default" else f" · pool {escape(worker['pool'])}"
    title = f"{escape(worker['name'])} [dim]pid {worker['pid']}{pool}[/]"
    columns = ("model", "slots", "wait", "tok/s", "KV", "hits", "done", "threads")
    table = table_of(*columns, right=", ".join(columns[1:]), title=title)
    for model in worker["models"]:
        label = escape(model["id"]) + (" [dim](default)[/]" if model["default"] else "")
        table.add_row(label, *_status_cells(model), str(model.get("threads", "-")))
    return Group(table, *_disk_lines(worker["models"]), *filter(None, map(_difference, worker["wanted"])))


def _status_cells(model: dict[str, Any]) -> tuple[str, ...]:
    if (engine := model["engine"]) is not None:
        return (
            f"{_busy_slots(engine)}/{engine['slots_total']}",
            str(engine["requests_waiting"]),
            f"{engine['generation_rate']:.0f}",
            f"{100 * engine['kv_used_tokens'] / engine['kv_total_tokens']:.0f} %",
            _hit_rate(engine),
            str(engine["requests_finished"]),
        )
    if (counts := _embedding_counts(model)) is None:
        return ("-",) * 6
    waiting, finished = str(counts["requests_waiting"]), str(counts["requests_finished"])
    return ("-", waiting, f"{counts['prompt_rate']:.0f}", "-", "-", finished)


def _disk_lines(models: list[dict[str, Any]]) -> list[str]:
    """Return the used space and the quota of each KV state directory.

    Models that share a directory may report different sizes for it.
    """
    used_by_quota: dict[int, int] = {}
    for engine in filter(None, (model["engine"] for model in models)):
        quota, used = engine.get("disk_quota_bytes", 0), engine.get("disk_used_bytes", 0)
        used_by_quota[quota] = max(used, used_by_quota.get(quota, 0))  # the largest is the newest
    lines = [
        f"KV states on disk: {readable(used)} of {readable(quota)}" for quota, used in used_by_quota.items() if quota
    ]
    return [f"[dim]{line}[/]" for line in lines]


def _difference(thing: dict[str, Any]) -> str:
    """Return how a worker's model or adapter differs from the desired state, or "" if it does not differ."""
    if thing["state"] in ("ready", "available"):
        return ""
    name = f"model {thing['model']}" if thing["adapter"] is None else f"adapter {thing['adapter']} of {thing['model']}"
    state = {"loading": "loading", "lacking": "missing", "leaving": "unloading"}[thing["state"]]
    cause = "" if thing["why"] is None else f": {thing['why']['message']}"
    return f"[yellow]{state} {escape(name)}{escape(cause)}[/]"


def _totals(totals: dict[str, Any], age_s: float) -> list[str]:
    """Return the totals across all workers, and the age of the workers' values."""
    hits = ", ".join(f"{totals[f'cache_hits_{kind}']} {name}" for kind, name in HITS.items())
    disk = f"; on disk: {totals['disk_saves']} written, {totals['disk_loads']} read" if totals["disk_saves"] else ""
    return [
        f"[dim]all models, {age_s:.1f} s ago: {totals['phase']}, {totals['requests_running']} requests running, "
        f"{totals['requests_waiting']} waiting in workers; tok/s: {totals['prompt_rate']:.0f} prompt, "
        f"{totals['generation_rate']:.0f} generated[/]",
        f"[dim]prefixes: {hits}, {totals['cache_misses']} missed; KV states in RAM: {totals['ram_states']}, "
        f"{totals['ram_saves']} saved, {totals['ram_evictions']} evicted{disk}[/]",
    ]


def _queue_lines(status: dict[str, Any]) -> list[str]:
    """Return one line that lists all queues with jobs, and one line for each queue that no worker serves."""
    unserved = status["unserved"]
    counts = {model: max(status["waiting"][model], status["queues"][model]) for model in status["waiting"]}
    served = [model for model, count in counts.items() if count and model not in unserved]
    queues = [_queue_text(model, counts[model], status["classes"][model]) for model in served]
    return [
        f"[dim]waiting jobs: {', '.join(queues) or 'none'}[/]",
        *(
            f"[yellow]{plural(counts[model], 'job')} waiting for {escape(model)}, which no worker serves[/]"
            for model in unserved
        ),
    ]


def _queue_text(model: str, count: int, classes: dict[str, Any]) -> str:
    """Return the number of waiting jobs, and the estimated wait for a new job of each priority class.

    The estimates differ because urgent jobs don't wait for bulk jobs.
    """
    waits = [f"{name} ~{found['eta_s']:.1f} s" for name, found in classes.items() if found["eta_s"] is not None]
    return f"{escape(model)} {count}" + (f" (new job: {', '.join(waits)})" if waits else "")


_OUTCOMES = {"cancelled": "was cancelled", "timeout": "exceeded its timeout", "error": "failed"}


def _render_position(position: dict[str, Any]) -> str:
    job = f"job {position['job_id']}"
    if position["state"] == "done":
        cause = f": {escape(printable(position['error']))}" if position["error"] else ""
        return f"{job} {_OUTCOMES.get(position['finish_reason'], 'is done')}{cause}"
    if position["state"] == "running":
        return f"{job} is running"
    return f"{job} is waiting: {position['ahead']} job(s) ahead, {_estimate(position)}"


def _render_watched_position(position: dict[str, Any], problem: str | None) -> RenderableType:
    line = _render_position(position)
    return line if problem is None else Group(line, f"[yellow]{escape(problem)}; retrying …[/]")


def _estimate(position: dict[str, Any]) -> str:
    eta_s, min_s, max_s = (position[name] for name in ("eta_s", "eta_least_s", "eta_most_s"))
    if not position["served"]:
        return "no worker serves its model"
    if eta_s is None:
        return "no estimate yet"
    if position["learnt_from"]:
        basis = f"from {plural(position['learnt_from'], 'finished job')}"
    else:
        basis = "a guess, because no such job has finished yet"
    return f"it starts in about {eta_s:.1f} s ({min_s:.1f} to {max_s:.1f} s, {basis})"


# The screen of `top`


def _render_screen(view: dict[str, Any], problem: str | None) -> RenderableType:
    return render_screen(view, problem, out.height)


def render_screen(view: dict[str, Any], problem: str | None, height: int) -> RenderableType:
    """Return the `top` screen in at most `height` lines."""
    shares = view["tenants"] if len(view["tenants"]) > 1 else []  # one tenant has everything
    fixed_lines, num_parts = (FIXED_LINES + SHARE_LINES, 5) if shares else (FIXED_LINES, 4)
    max_rows = max(MIN_ROWS, (height - fixed_lines) // num_parts)  # rows of each table, and of the errors
    parts: list[RenderableType] = [_summary(view)]
    if problem is not None:
        parts.append(f"[red]{escape(problem)}; retrying …[/]")
    queues = _queue_table(view, max_rows)
    parts.append(queues if queues.row_count else "\n [dim]no job is waiting[/]\n")
    if shares:
        parts.append(_with_rest(tenant_table(shares, max_rows), shares, max_rows))
    return Group(*parts, _model_table(view, max_rows), _worker_table(view, max_rows), *_error_lines(view, max_rows))


def _summary(view: dict[str, Any]) -> str:
    totals, num_workers = view["totals"], view["workers"]
    dead = f", [red]{plural(len(view['dead']), 'dead job')}[/]" if view["dead"] else ""
    workers = plural(num_workers, "worker") if num_workers else "[red]no worker is running[/]"
    return (
        f"{workers}, slots: {totals['slots_busy']}/{totals['slots_total']}, "
        f"tok/s: {totals['prompt_rate']:.0f} prompt, {totals['generation_rate']:.0f} generated, "
        f"hits: {_hit_rate(totals)}{dead}"
    )


def _queue_table(view: dict[str, Any], max_rows: int) -> Table:
    """Return the table of all queues with jobs.

    Queues without a worker come first, followed by the queues with the longest waits. The two priority classes have
    separate estimates, because a new urgent job does not wait for bulk jobs.
    """
    unserved = view["unserved"]
    names = [model for model in view["classes"] if view["waiting"][model] or _num_plain_messages(view, model)]
    names.sort(
        key=lambda model: (model not in unserved, *(-value for value in _longest_waits(view["classes"][model])), model)
    )
    table = table_of(*QUEUE_COLUMNS, right=", ".join(QUEUE_COLUMNS[1:]))
    for model in names[:max_rows]:
        classes, num_plain = view["classes"][model], _num_plain_messages(view, model)
        label = escape(model) + (f" [dim](+{num_plain} from plain Celery)[/]" if num_plain else "")
        counts = [str(classes[name]["waiting"]) for name in CLASSES]
        oldest = _wait(_longest_waits(classes)[1]) if view["waiting"][model] else "?"
        waits = ["[red]no worker[/]" if model in unserved else _wait(classes[name]["eta_s"]) for name in CLASSES]
        table.add_row(label, *counts, oldest, *waits)
    return _with_rest(table, names, max_rows)


def _longest_waits(classes: dict[str, Any]) -> tuple[float, float]:
    """Return the longest estimated wait and the longest wait so far, in seconds, across classes with waiting jobs."""
    busy = [found for found in classes.values() if found["waiting"]]
    longest_eta_s = max((found["eta_s"] or 0.0 for found in busy), default=0.0)
    return longest_eta_s, max((found["oldest_s"] for found in busy), default=0.0)


def _num_plain_messages(view: dict[str, Any], model: str) -> int:
    """Return the number of messages in an unserved queue that are not yet jobs because no worker has read them."""
    return max(0, view["queues"][model] - view["waiting"][model]) if model in view["unserved"] else 0


def _wait(seconds: float | None) -> str:
    return "?" if seconds is None else _coloured(f"{seconds:.1f} s", seconds, LATE_S, VERY_LATE_S)


def _model_table(view: dict[str, Any], max_rows: int) -> Table:
    """Return the table of all workers' models, busiest first."""
    found = [(worker, model) for worker in view["live"] for model in worker["models"]]
    found.sort(key=lambda pair: (-_load(pair[1]), pair[1]["id"], pair[0]["name"]))
    numbers = ("slots", "wait", "tok/s", "KV", "hits", "lost slots", "errors")
    table = table_of("model", "worker", *numbers, right=", ".join(numbers))
    for worker, model in found[:max_rows]:
        table.add_row(escape(model["id"]), escape(worker["name"]), *_screen_cells(model))
    return _with_rest(table, found, max_rows)


def _load(model: dict[str, Any]) -> float:
    engine = model["engine"]
    if engine is None:
        return 0.0
    return float((_busy_slots(engine) + engine["requests_waiting"]) / max(1, engine["slots_total"]))


def _screen_cells(model: dict[str, Any]) -> tuple[str, ...]:
    engine = model["engine"]
    if engine is None:
        counts = _embedding_counts(model) or dict.fromkeys(EMBED_FIELDS, 0)
        waiting, rate = str(counts["requests_waiting"]), f"{counts['prompt_rate']:.0f}"
        return (model["status"], waiting, rate, "-", "-", "-", _num_errors(counts["requests_failed"]))
    busy, total = _busy_slots(engine), engine["slots_total"]
    kv = engine["kv_used_tokens"] / max(1, engine["kv_total_tokens"])
    return (
        _coloured(f"{busy}/{total}", busy / max(1, total), FULL, 2.0),
        _coloured(str(engine["requests_waiting"]), engine["requests_waiting"], 1, 2 * total + 1),
        f"{engine['generation_rate']:.0f}",
        _coloured(f"{100 * kv:.0f} %", kv, FULL, VERY_FULL),
        _hit_rate(engine),
        str(engine["preemptions"]),
        _num_errors(engine["requests_failed"]),
    )


def _num_errors(count: int) -> str:
    return f"[red]{count}[/]" if count else "0"


def _worker_table(view: dict[str, Any], max_rows: int) -> Table:
    """Return the table of workers, sorted by the age of their last heartbeat, oldest first."""
    workers = sorted(view["live"], key=lambda worker: (-int(worker["age_s"] / STALE_S), worker["name"]))
    table = table_of("worker", "pool", "seen", "cores", "missing models", right="seen, cores")
    for worker in workers[:max_rows]:
        missing = ", ".join(thing["model"] for thing in worker["wanted"] if thing["state"] == "lacking")
        age = _coloured(f"{worker['age_s']:.1f} s ago", worker["age_s"], STALE_S, 2 * STALE_S)
        cores = f"{worker['cores']['uses']:.1f}"
        row = (escape(worker["name"]), escape(worker["pool"]), age, cores, f"[red]{escape(missing)}[/]")
        table.add_row(*row if missing else row[:-1])
    return _with_rest(table, workers, max_rows)


def _error_lines(view: dict[str, Any], max_lines: int) -> list[str]:
    """Return one line for each recent load failure and each recent dead job."""
    failures = [
        f"[yellow]{escape(worker['name'])}: {escape(name)}: {escape(failure['message'].partition(chr(10))[0])}[/]"
        for worker in view["live"]
        for name, failure in worker["failures"].items()
    ]
    dead = [
        f"[red]dead: {escape(job['id'])} in {escape(job['queue'])}, {job['attempts']} attempts, "
        f"the last on {escape(job['last_worker'])}[/]"
        for job in view["dead"]
    ]
    return [*failures, *dead][:max_lines]


def _with_rest(table: Table, rows: list[Any], max_rows: int) -> Table:
    """Return the table with a caption that counts the rows that did not fit."""
    if len(rows) > max_rows:
        table.caption = f"{len(rows) - max_rows} more"
    return table

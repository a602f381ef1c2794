"""The command status: workers, queues, or where one job is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape

from cellama.api.client.client import Client

from .generation import JsonOption
from .output import out, print_json, printable, readable, table_of
from .top import watch as keep_looking, watch_all

WATCH_S = 1.0  # between two views; workers report every 2 s
READS = ("requests_waiting", "prompt_rate", "requests_finished")
HITS = {"slot": "in their slot", "copy": "from another slot", "ram": "from RAM", "disk": "from disk"}


def status_command(
    job_id: Annotated[str | None, typer.Argument(help="Id of a job whose state and estimated start to show.")] = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second until Ctrl-C.")] = False,
) -> None:
    """Show workers, models, slots, queues and the token rate, or the state of one job. --watch is `cellama top`.

    Example:  cellama status --watch
    """
    with Client() as client:

        def read() -> dict[str, Any]:
            return asdict(client.position(job_id)) if job_id else _read(client)

        if json:
            print_json(read())
        elif not watch:
            out.print(_render_position(read()) if job_id else _render(read()))
        elif job_id:
            keep_looking(read, _position_or_problem, WATCH_S, whole=False)
        else:
            watch_all(client, WATCH_S)


def _position_or_problem(position: dict[str, Any], problem: str | None) -> RenderableType:
    shown = _render_position(position)
    return shown if problem is None else Group(shown, f"[yellow]{escape(problem)}; retrying …[/]")


def _read(client: Client) -> dict[str, Any]:
    return {**client.stats(), "live": [asdict(worker) for worker in client.workers()]}


def _render(status: dict[str, Any]) -> RenderableType:
    if status["live"]:
        return Group(*map(_worker, status["live"]), *_totals(status["totals"], status["age_s"]), *_queues(status))
    return Group("no worker is running; start one with `cellama up` or `cellama worker`", *_queues(status))


def _worker(worker: dict[str, Any]) -> RenderableType:
    """Return what a worker serves, in a table that fits into 80 columns."""
    pool = "" if worker["pool"] == "default" else f" · pool {escape(worker['pool'])}"
    title = f"{escape(worker['name'])} [dim]pid {worker['pid']}{pool}[/]"
    columns = ("model", "slots", "wait", "tok/s", "KV", "hits", "done", "threads")
    table = table_of(*columns, right=", ".join(columns[1:]), title=title)
    for model in worker["models"]:
        label = escape(model["id"]) + (" [dim](default)[/]" if model["default"] else "")
        table.add_row(label, *_cells(model), str(model.get("threads", "-")))
    return Group(table, *_folders(worker["models"]), *filter(None, map(_other_than_wanted, worker["wanted"])))


def _folders(models: list[dict[str, Any]]) -> list[str]:
    """Return how full the directories of KV states are. Models that share one may differ a little: the most counts."""
    full: dict[int, int] = {}
    for engine in filter(None, (model["engine"] for model in models)):
        quota, used = engine.get("disk_quota_bytes", 0), engine.get("disk_used_bytes", 0)
        full[quota] = max(used, full.get(quota, 0))
    return [f"[dim]states on disk: {readable(used)} of {readable(quota)}[/]" for quota, used in full.items() if quota]


def _other_than_wanted(thing: dict[str, Any]) -> str:
    """Return how a worker differs from its desired state in one thing; "" if it does not."""
    if thing["state"] == "ready":
        return ""
    name = f"model {thing['model']}" if thing["adapter"] is None else f"adapter {thing['adapter']} of {thing['model']}"
    state = {"loading": "is loading", "lacking": "lacks", "leaving": "is unloading"}[thing["state"]]
    why = "" if thing["why"] is None else f": {thing['why']['message']}"
    return f"[yellow]{state} {escape(name)}{escape(why)}[/]"


def _cells(model: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a model: of its engine, or of what it reads if it only embeds or reranks."""
    if (engine := model["engine"]) is not None:
        return _engine_cells(engine)
    parts = [model[name] for name in ("embedder", "reranker") if model[name] is not None]
    if not parts:
        return ("-",) * 6
    waiting, rate, done = (sum(part[name] for part in parts) for name in READS)
    return ("-", str(waiting), f"{rate:.0f}", "-", "-", str(done))


def _engine_cells(engine: dict[str, Any]) -> tuple[str, ...]:
    busy = engine["slots_prefilling"] + engine["slots_decoding"]
    kv = 100 * engine["kv_used_tokens"] / engine["kv_total_tokens"]
    looked = engine["cache_hits"] + engine["cache_misses"]
    return (
        f"{busy}/{engine['slots_total']}",
        str(engine["requests_waiting"]),
        f"{engine['generation_rate']:.0f}",
        f"{kv:.0f} %",
        f"{100 * engine['cache_hits'] / looked:.0f} %" if looked else "-",  # of prompts, a prefix was in the cache
        str(engine["requests_finished"]),
    )


def _totals(totals: dict[str, Any], age_s: float) -> list[str]:
    """Return the totals of all workers, and how old they are."""
    hits = ", ".join(f"{totals[f'cache_hits_{kind}']} {name}" for kind, name in HITS.items())
    disk = f"; on disk: {totals['disk_saves']} written, {totals['disk_loads']} read" if totals["disk_saves"] else ""
    return [
        f"[dim]all models, {age_s:.1f} s ago: {totals['phase']}, {totals['requests_running']} requests run, "
        f"{totals['requests_waiting']} wait in workers; tok/s: {totals['prompt_rate']:.0f} prompt, "
        f"{totals['generation_rate']:.0f} generated[/]",
        f"[dim]prefixes: {hits}, {totals['cache_misses']} missed; states in RAM: {totals['ram_states']}, "
        f"{totals['ram_saves']} saved, {totals['ram_evictions']} evicted{disk}[/]",
    ]


def _queues(status: dict[str, Any]) -> list[str]:
    """Return the queues with jobs in one line, and a line for each queue that no worker serves."""
    unserved = status["unserved"]
    counts = {model: max(status["waiting"][model], status["queues"][model]) for model in status["waiting"]}
    served = [model for model, count in counts.items() if count and model not in unserved]
    lines = [_queue(model, counts[model], status["classes"][model]) for model in served]
    return [
        "[dim]jobs without a slot: " + (", ".join(lines) or "none") + "[/]",
        *(f"[yellow]{counts[model]} job(s) wait for {escape(model)}, which no worker serves[/]" for model in unserved),
    ]


def _queue(model: str, count: int, classes: dict[str, Any]) -> str:
    """Return how many jobs wait, and the estimate for a new job of each class: urgent ones don't wait for bulk jobs."""
    waits = [f"{name} ~{told['eta_s']:.1f} s" for name, told in classes.items() if told["eta_s"] is not None]
    return f"{escape(model)} {count}" + (f" (new job: {', '.join(waits)})" if waits else "")


_ENDS = {"cancelled": "was cancelled", "timeout": "is done: its timeout was over", "error": "has failed"}


def _render_position(position: dict[str, Any]) -> str:
    job = f"job {position['job_id']}"
    if position["state"] == "done":
        why = f": {escape(printable(position['error']))}" if position["error"] else ""
        return f"{job} {_ENDS.get(position['finish_reason'], 'is done')}{why}"
    if position["state"] == "running":
        return f"{job} runs"
    return f"{job} waits: {position['ahead']} job(s) ahead, {_when(position)}"


def _when(position: dict[str, Any]) -> str:
    eta_s, least_s, most_s = (position[name] for name in ("eta_s", "eta_least_s", "eta_most_s"))
    if not position["served"]:
        return "no worker serves its model now"
    if eta_s is None:
        return "nothing is known yet of how long such jobs take"
    known = f"from {position['learnt_from']} jobs" if position["learnt_from"] else "guessed: none of its kind has ended"
    return f"a slot is free in about {eta_s:.1f} s ({least_s:.1f} to {most_s:.1f} s; {known})"

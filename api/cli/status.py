"""The commands that look and touch: status, cancel."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from cellama.api.client.client import Client

from .generation import JsonOption
from .output import out, print_json

WATCH_S = 1.0


def status_command(
    job_id: Annotated[str | None, typer.Argument(help="Id of a job: where it is, and when its turn comes.")] = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second; Ctrl-C ends it.")] = False,
) -> None:
    """Show workers, models, slots, queues and the token rate; or where one job is.

    Example:  cellama status --watch
    """
    with Client() as client:

        def read() -> dict[str, Any]:
            return asdict(client.position(job_id)) if job_id else _read(client)

        render = _render_position if job_id else _render
        if json:
            print_json(read())
        elif not watch:
            out.print(render(read()))
        else:
            with Live(render(read()), console=out, screen=False, auto_refresh=False) as live:
                while True:
                    time.sleep(WATCH_S)
                    live.update(render(read()), refresh=True)


def cancel_command(
    job_id: Annotated[str, typer.Argument(help="Id of the job.")],
    json: JsonOption = False,
) -> None:
    """Cancel a job wherever it is: waiting or running.

    Example:  cellama cancel 5f0c…
    """
    with Client() as client:
        client.cancel(job_id)
    if json:
        print_json({"job_id": job_id, "cancelled": True})
    else:
        out.print(f"asked the workers to cancel job {job_id}")


def _read(client: Client) -> dict[str, Any]:
    return {**client.stats(), "live": [asdict(worker) for worker in client.workers()]}


def _render(status: dict[str, Any]) -> RenderableType:
    if not status["live"]:
        waiting = sum(status["queues"].values())
        return f"no worker is running ({waiting} job(s) wait); start one with `cellama up` or `cellama worker`"
    return Group(_workers(status["live"]), _totals(status))


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = Table(title="Workers", title_justify="left", header_style="bold")
    for column in ("worker", "model", "threads", "slots", "waiting", "tok/s", "KV", "prefix hits", "done"):
        table.add_column(column, justify="left" if column in ("worker", "model") else "right", no_wrap=True)
    for worker in workers:
        name = f"{worker['name']} [dim]{worker['pid']}[/]"
        for model in worker["models"]:
            label = model["id"] + (" [dim](default)[/]" if model["default"] else "")
            table.add_row(name, label, str(model.get("threads", "-")), *_engine_cells(model["engine"]))
            name = ""
    return table


def _engine_cells(engine: dict[str, Any] | None) -> tuple[str, ...]:
    if engine is None:
        return ("-",) * 6
    busy = engine["slots_prefilling"] + engine["slots_decoding"]
    kv = 100 * engine["kv_used_tokens"] / engine["kv_total_tokens"]
    return (
        f"{busy}/{engine['slots_total']}",
        str(engine["queue_depth"]),
        f"{engine['generation_rate']:.0f}",
        f"{kv:.0f} %",
        f"{engine['cache_hits']}/{engine['cache_hits'] + engine['cache_misses']}",
        str(engine["requests_finished"]),
    )


def _totals(status: dict[str, Any]) -> str:
    queues = [_queue(model, count, status["eta_s"][model]) for model, count in status["waiting"].items() if count]
    return "[dim]jobs without a slot: " + (", ".join(queues) or "none") + "[/]"


def _queue(model: str, count: int, eta_s: float | None) -> str:
    return f"{model} {count}" + ("" if eta_s is None else f" (a new one waits about {eta_s:.1f} s)")


def _render_position(position: dict[str, Any]) -> str:
    if position["state"] != "waiting":
        return f"job {position['job_id']} {'runs' if position['state'] == 'running' else 'is done'}"
    eta_s = position["eta_s"]
    when = "nobody serves its model now" if eta_s is None else f"a slot is free in about {eta_s:.1f} s"
    return f"job {position['job_id']} waits: {position['ahead']} job(s) ahead, {when}"

"""The commands that look and touch: status, cancel."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from .client import Client
from .generation import JsonOption
from .output import out, print_json

WATCH_S = 1.0


def status_command(
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second; Ctrl-C ends it.")] = False,
) -> None:
    """Show workers, models, slots, queues and the token rate.

    Example:  cellama status --watch
    """
    with Client() as client:
        if json:
            print_json(_read(client))
        elif not watch:
            out.print(_render(_read(client)))
        else:
            with Live(_render(_read(client)), console=out, screen=False, auto_refresh=False) as live:
                while True:
                    time.sleep(WATCH_S)
                    live.update(_render(_read(client)), refresh=True)


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
    for column in ("worker", "model", "slots", "waiting", "tok/s", "KV", "prefix hits", "done"):
        table.add_column(column, justify="left" if column in ("worker", "model") else "right", no_wrap=True)
    for worker in workers:
        name = f"{worker['name']} [dim]{worker['pid']}[/]"
        for model in worker["models"]:
            label = model["id"] + (" [dim](default)[/]" if model["default"] else "")
            table.add_row(name, label, *_engine_cells(model["engine"]))
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
    queues = ", ".join(f"{model} {depth}" for model, depth in status["queues"].items())
    return f"[dim]jobs waiting in Redis: {queues}[/]"

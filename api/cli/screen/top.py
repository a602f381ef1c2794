"""The command top: queues, models and workers on one screen, the worst first."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from cellama.api.cli.output import out
from cellama.api.client.client import Client

from .tables import screen
from .watching import watch


def top_command(
    every: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
) -> None:
    """Watch queues, models and workers on one screen, what is late first; Ctrl-C ends it.

    Example:  cellama top --every 2
    """
    with Client() as client:
        if once:
            out.print(_shown(look(client), None))
        else:
            watch_all(client, every)


def watch_all(client: Client, every_s: float) -> None:
    """Shows the screen until Ctrl-C."""
    watch(partial(look, client), _shown, every_s, whole=True)


def look(client: Client) -> dict[str, Any]:
    """All that the screen shows. Raises RedisUnreachable, RedisRefused."""
    workers = [asdict(worker) for worker in client.workers()]
    return {**client.stats(), "live": workers, "dead": client.dead()}


def _shown(seen: dict[str, Any], problem: str | None) -> RenderableType:
    return screen(seen, problem, out.height)

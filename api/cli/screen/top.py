"""The command top: queues, models and workers on one screen, the worst first."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.live import Live

from cellama.api.cli.output import out
from cellama.api.client.client import Client
from cellama.tasks.contract.errors import RedisRefused, RedisUnreachable

from .tables import screen


def top_command(
    every: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
) -> None:
    """Watch queues, models and workers on one screen, what is late first; Ctrl-C ends it.

    Example:  cellama top --every 2
    """
    with Client() as client:
        if once:
            out.print(screen(look(client), None, out.height))
            return
        with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
            _watch(client, every)


def look(client: Client) -> dict[str, Any]:
    """All that the screen shows. Raises RedisUnreachable, RedisRefused."""
    workers = [asdict(worker) for worker in client.workers()]
    return {**client.stats(), "live": workers, "dead": client.dead()}


def _watch(client: Client, every_s: float) -> None:
    """What was seen last stays while Redis does not answer."""
    seen, problem = look(client), None
    with Live(screen(seen, problem, out.height), console=out, screen=out.is_terminal, auto_refresh=False) as live:
        while True:
            live.update(screen(seen, problem, out.height), refresh=True)
            time.sleep(every_s)
            try:
                seen, problem = look(client), None
            except (RedisUnreachable, RedisRefused) as error:
                problem = str(error)

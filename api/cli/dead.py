"""The commands for jobs that were put aside: dead list, dead requeue."""

from __future__ import annotations

from typing import Annotated

import typer

from cellama.api.client.client import Client

from .generation import JsonOption
from .output import out, print_json, readable_time, table_of


def dead_list_command(json: JsonOption = False) -> None:
    """List the jobs whose workers died again and again while they ran.

    Example:  cellama dead list
    """
    with Client() as client:
        dead = client.dead()
    if json:
        print_json(dead)
        return
    if not dead:
        out.print("no job was put aside")
        return
    table = table_of("job", "task", "queue", "attempts", "died", "last worker", right="attempts", title="Dead jobs")
    for entry in dead:
        died = readable_time(entry["at"])
        attempts = str(entry["attempts"])
        table.add_row(entry["id"], entry["task"], entry["queue"], attempts, died, entry["last_worker"])
    out.print(table)


def dead_requeue_command(
    job_ids: Annotated[list[str], typer.Argument(help="Ids of dead jobs, or `all`.")],
    json: JsonOption = False,
) -> None:
    """Queue dead jobs again, as new jobs: the streams of the old ones have ended.

    Example:  cellama dead requeue all
    """
    with Client() as client:
        if job_ids == ["all"]:
            job_ids = [entry["id"] for entry in client.dead()]
        requeued = {job_id: client.requeue_dead(job_id).id for job_id in job_ids}
    if json:
        print_json(requeued)
    else:
        for old, new in requeued.items():
            out.print(f"{old} is queued again as {new}")

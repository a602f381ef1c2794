"""The commands `cellama jobs`, `cancel`, `queue` and `dead`, which list, follow, cancel and requeue jobs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.prompt import Confirm

from cellama.api.client.client import Client
from cellama.tasks.contract.codes import Exit

from .following import SilenceTimeout, show
from .options import JsonOption, PatienceOption
from .output import err, out, plural, print_error, print_json, readable_time, table_of

DEFAULT_LIMIT = 50  # jobs: about one screen
JobArgument = Annotated[str, typer.Argument(help="Job id.")]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="Show only jobs for this model.")]


def jobs_list_command(
    model: ModelOption = None,
    limit: Annotated[int, typer.Option(help="Maximum number of jobs to show.", min=1)] = DEFAULT_LIMIT,
    json: JsonOption = False,
) -> None:
    """List running and waiting jobs, including jobs for models that no worker serves.

    Example:  cellama jobs list --model tiny
    """
    with Client() as client:
        jobs = client.jobs(model, limit=limit)
    if json:
        print_json([asdict(job) for job in jobs])
        return
    if not jobs:
        out.print("no job is running or waiting")
        return
    table = table_of("job", "state", "kind", "model", "since", right="")
    for job in jobs:
        table.add_row(job.job_id, job.state, job.kind, job.model, readable_time(job.submitted_at)[5:])
    out.print(table)
    if len(jobs) == limit:
        out.print(
            f"[dim]only the first {limit} jobs are shown; see more with --limit, or count them with `cellama status`[/]"
        )


def jobs_follow_command(job_id: JobArgument, json: JsonOption = False, patience: PatienceOption = 60.0) -> None:
    """Stream a job's output from the start until the job finishes. Ctrl-C does not cancel the job.

    Example:  cellama jobs follow 5f0c…
    """
    with Client() as client:
        try:
            show(client.job(job_id), json, SilenceTimeout(job_id, patience, allow_unserved=True))
        except KeyboardInterrupt:
            err.print(f"\n[yellow]job {job_id} continues; to cancel it: cellama cancel {job_id}[/]")
            raise


def cancel_command(
    job_ids: Annotated[list[str], typer.Argument(help="Ids of the jobs.")],
    json: JsonOption = False,
) -> None:
    """Cancel running or waiting jobs.

    Example:  cellama cancel 5f0c…
    """
    with Client() as client:
        states = {
            job_id: client.position(job_id).state for job_id in job_ids
        }  # an unknown id raises before any job is cancelled
        open_ids = [job_id for job_id in job_ids if states[job_id] != "done"]
        for job_id in open_ids:
            client.cancel(job_id)
    for job_id in job_ids:
        if json:
            print_json({"job_id": job_id, "state": states[job_id], "cancelled": job_id in open_ids})
        elif job_id in open_ids:
            out.print(f"cancelled job {job_id}, which was {states[job_id]}")
        else:
            print_error(f"job {job_id} has already finished; see its outcome with `cellama status {job_id}`")
    if len(open_ids) < len(job_ids):
        raise typer.Exit(Exit.FAILED)


def jobs_cancel_command(
    job_ids: Annotated[list[str], typer.Argument(help="Ids of the jobs.")],
    json: JsonOption = False,
) -> None:
    """Cancel running or waiting jobs. `cellama cancel` does the same.

    Example:  cellama jobs cancel 5f0c…
    """
    cancel_command(job_ids, json)


def queue_purge_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation prompt.")] = False,
    json: JsonOption = False,
) -> None:
    """Cancel all waiting jobs for a model. Running jobs continue, and bulk runs resend their lines.

    Example:  cellama queue purge tiny --yes
    """
    with Client() as client:
        if not yes and not Confirm.ask(f"Cancel all waiting jobs of {model}?", console=err):
            raise typer.Exit(Exit.FAILED)
        count = client.purge(model)
    if json:
        print_json({"model": model, "ended": count})
    else:
        out.print(f"cancelled {plural(count, 'waiting job')} of {model}")


def dead_list_command(json: JsonOption = False) -> None:
    """List dead jobs. A job is dead after its workers have crashed three times.

    Example:  cellama dead list
    """
    with Client() as client:
        dead = client.dead()
    if json:
        print_json(dead)
        return
    if not dead:
        out.print("no dead jobs")
        return
    table = table_of("job", "task", "queue", "attempts", "time", "last worker", right="attempts", title="Dead jobs")
    for entry in dead:
        died = readable_time(entry["at"])
        attempts = str(entry["attempts"])
        table.add_row(entry["id"], entry["task"], entry["queue"], attempts, died, entry["last_worker"])
    out.print(table)


def dead_requeue_command(
    job_ids: Annotated[list[str], typer.Argument(help="Ids of dead jobs, or all to requeue every dead job.")],
    json: JsonOption = False,
) -> None:
    """Requeue dead jobs under new ids.

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
            out.print(f"job {old} is queued again as {new}")

"""The commands for jobs and queues: jobs list, follow, cancel; queue purge."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.prompt import Confirm

from cellama.api.client.client import Client
from cellama.tasks.contract.codes import Exit

from .following import SilenceTimeout, show
from .generation import JsonOption, PatienceOption
from .output import err, out, print_error, print_json, readable_time, table_of

LIMIT = 50  # jobs: about a screen
JobArgument = Annotated[str, typer.Argument(help="Id of the job.")]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help="Show only jobs for this model.")]


def jobs_list_command(
    model: ModelOption = None,
    limit: Annotated[int, typer.Option(help="Maximum number of jobs to show.", min=1)] = LIMIT,
    json: JsonOption = False,
) -> None:
    """List the jobs that run or wait, including those of models that no worker serves.

    Example:  cellama jobs list --model tiny
    """
    with Client() as client:
        jobs = client.jobs(model, limit=limit)
    if json:
        print_json([asdict(job) for job in jobs])
        return
    if not jobs:
        out.print("no job runs or waits")
        return
    table = table_of("job", "state", "kind", "model", "since", right="")
    for job in jobs:
        table.add_row(job.job_id, job.state, job.kind, job.model, readable_time(job.submitted_at)[5:])
    out.print(table)
    if len(jobs) == limit:
        out.print(f"[dim]these are the first {limit}; --limit shows more, `cellama status` counts them[/]")


def jobs_follow_command(job_id: JobArgument, json: JsonOption = False, patience: PatienceOption = 60.0) -> None:
    """Show the stream of a job from its start to its end. Ctrl-C does not cancel the job.

    Example:  cellama jobs follow 5f0c…
    """
    with Client() as client:
        try:
            show(client.job(job_id), json, SilenceTimeout(job_id, patience, unserved=True))
        except KeyboardInterrupt:
            err.print(f"\n[yellow]job {job_id} continues; `cellama cancel {job_id}` cancels it[/]")
            raise


def cancel_command(
    job_ids: Annotated[list[str], typer.Argument(help="Ids of jobs.")],
    json: JsonOption = False,
) -> None:
    """Cancel jobs that wait or run.

    Example:  cellama cancel 5f0c…
    """
    with Client() as client:
        states = {job_id: client.position(job_id).state for job_id in job_ids}  # all are checked before any is touched
        open_ids = [job_id for job_id in job_ids if states[job_id] != "done"]
        for job_id in open_ids:
            client.cancel(job_id)
    for job_id in job_ids:
        if json:
            print_json({"job_id": job_id, "state": states[job_id], "cancelled": job_id in open_ids})
        elif job_id in open_ids:
            out.print(f"job {job_id} is cancelled: it {'ran' if states[job_id] == 'running' else 'waited'}")
        else:
            print_error(f"job {job_id} has ended already; `cellama status {job_id}` shows how")
    if len(open_ids) < len(job_ids):
        raise typer.Exit(Exit.FAILED)


def jobs_cancel_command(
    job_ids: Annotated[list[str], typer.Argument(help="Ids of jobs.")],
    json: JsonOption = False,
) -> None:
    """Cancel jobs that wait or run, as `cellama cancel` does.

    Example:  cellama jobs cancel 5f0c…
    """
    cancel_command(job_ids, json)


def queue_purge_command(
    model: Annotated[str, typer.Argument(help="Model id, or :default.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False,
    json: JsonOption = False,
) -> None:
    """Cancel all jobs that wait for a model. Running jobs continue, and bulk runs send their lines again.

    Example:  cellama queue purge tiny --yes
    """
    with Client() as client:
        if not yes and not Confirm.ask(f"Cancel all jobs that wait for {model}?", console=err):
            raise typer.Exit(Exit.FAILED)
        count = client.purge(model)
    if json:
        print_json({"model": model, "ended": count})
    else:
        out.print(f"ended {count} job(s) that waited for {model}")


def dead_list_command(json: JsonOption = False) -> None:
    """List the jobs that were stopped because their workers died three times while they ran.

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
    """Queue dead jobs again as new jobs, because the streams of the old ones have ended.

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

"""Jobs as steps of a canvas: what a worker of any app sends once a task of its own has ended.

Our tasks stand in the registries of the other Celery apps of a process, too, and stay ours there: a worker of a user's
app sends `generate` as the next step of a chain to our Redis, checked and noted like any other job.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery, Task, uuid
from celery.app.task import Context
from celery.result import AsyncResult
from celery.utils.functional import maybe_list

from cellama.tasks.connection.kombu_internals import (
    SHARING_PARTS,
    UnfitLibraries,
    require_parts,
    tasks_before_finalizing,
    tell_each_app,
)
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Message, Submission, TaskCall

log = logging.getLogger(__name__)


def refuse_step(task: Task, queue: str, options: dict[str, Any], error: InvalidJob) -> AsyncResult:
    """Ends the step as failed, with all that waits for it; the task before it has ended well, and stays so."""
    job_id = options.get("task_id") or uuid()
    context = Context(
        id=job_id,
        task=task.name,
        args=[],
        kwargs={},
        delivery_info={},
        callbacks=maybe_list(options.get("link")),
        errbacks=maybe_list(options.get("link_error")),
        chain=options.get("chain"),
        chord=options.get("chord"),
        group=options.get("group_id"),
        **{name: options.get(name) for name in ("group_index", "root_id", "parent_id", "ignore_result")},
    )
    failure = JobFailed(error.code, str(error))
    ledger = Ledger(task.backend.client)
    call = TaskCall(task=task.name, queue=queue)
    # With an entry in the ledger, readers of the step's stream receive the error as well.
    ledger.submit([Submission(job_id, call, message=Message("", ""))])
    ledger.end_waiting(job_id, events.error(failure.code, failure.message, failure.retryable))
    task.backend.mark_as_failure(job_id, failure, request=context)
    ledger.settle(job_id)
    return task.AsyncResult(job_id)


def share(app: Celery, kind: type[Task]) -> None:
    """Puts the tasks of this kind into the registries of all other apps, of those to come as well.

    Does nothing if the installed Celery is unfit: this runs when `cellama.tasks` is imported, and the error comes when
    a worker starts or a job is sent.
    """
    try:
        require_parts(*SHARING_PARTS)
    except UnfitLibraries:
        return

    def offer(other: Celery) -> None:
        if other is not app:
            for name, task in app.tasks.items():
                if isinstance(task, kind):
                    tasks_before_finalizing(other).setdefault(name, task)

    tell_each_app(offer)

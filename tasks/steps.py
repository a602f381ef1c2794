"""Jobs as steps of a canvas: what a worker of any app sends once a task of its own has ended.

Our tasks stand in the registries of the other Celery apps of a process, too, and stay ours there: a worker of a user's
app sends `generate` as the next step of a chain to our Redis, checked and noted like any other job.
"""

from __future__ import annotations

from typing import Any

from celery import Celery, Task, uuid
from celery._state import _get_active_apps, connect_on_app_finalize
from celery.app.amqp import _callback_publish_retry
from celery.app.task import Context
from celery.result import AsyncResult
from celery.utils.functional import maybe_list

from .contract import events
from .contract.errors import InvalidJob, JobFailed
from .ledger import Ledger
from .records import Call, Message, Submission


def follows_a_task() -> bool:
    """Whether Celery is just sending what comes after a task that has ended, in a worker of any app."""
    return bool(_callback_publish_retry.get())


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
    call, no_message = Call(task.name, [], {}, queue, 0, None, {}), Message("", "")
    ledger.submit([Submission(job_id, call, no_message)])  # whoever reads the step's stream is told as well
    ledger.end_waiting(job_id, events.error(failure.code, failure.message, failure.retryable))
    task.backend.mark_as_failure(job_id, failure, request=context)
    return task.AsyncResult(job_id)


def share(app: Celery, kind: type[Task]) -> None:
    """Puts the tasks of this kind into the registries of all other apps, of those to come as well."""

    def offer(other: Celery) -> None:
        if other is not app:
            for name, task in app.tasks.items():
                if isinstance(task, kind):
                    other._tasks.setdefault(name, task)

    connect_on_app_finalize(offer)
    for other in list(_get_active_apps()):
        if other.finalized:
            offer(other)

"""What Celery hears of an attempt by the ledger's own scripts, instead of by round trips of its own."""

from __future__ import annotations

import os

from celery import Task, states
from celery.app.task import get_actual_ignore_result

from cellama.tasks.broker.pool import JobControl
from cellama.tasks.broker.result_backend import IS_STORED
from cellama.tasks.contract.names import TOKEN_HEADER
from cellama.tasks.contract.shapes.results import Result
from cellama.tasks.state.records import CeleryEnd, Stored


def started_for_celery(task: Task) -> Stored | None:
    """That the task of a job has started, as Celery tells it; None if its state is not kept."""
    request = task.request
    if get_actual_ignore_result(task, request):
        return None
    where = {"pid": os.getpid(), "hostname": request.hostname}
    stored: Stored = task.backend.stored(request.id, where, states.STARTED, request)
    return stored


def celery_end_of(task: Task, control: JobControl) -> CeleryEnd | None:
    """How Celery hears of a job that ends well; None if more follows than a result: the next steps of a canvas come
    before it, in Celery's order."""
    request, shape, backend = task.request, task.kind.shape, task.backend
    if request.callbacks or request.chain or request.chord or get_actual_ignore_result(task, request):
        return None

    def stored(result: Result) -> Stored | None:
        if control.interruption is not None:  # Celery ends it in another way
            return None
        made: Stored = backend.stored(request.id, shape(result), states.SUCCESS, request)
        return made

    return CeleryEnd(stored, getattr(request, TOKEN_HEADER, ""))


def settle(task: Task, end: CeleryEnd | None, control: JobControl) -> None:
    """Saves Celery the words that Redis has heard already."""
    if end is not None and end.result is not None:
        control.is_settled = True
        setattr(task.request, IS_STORED, True)

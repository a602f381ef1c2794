"""Jobs as steps of a canvas: what a worker of any app sends once a task of its own has ended.

Our tasks stand in the registries of the other Celery apps of a process, too, and stay ours there: a worker of a user's
app sends `generate` as the next step of a chain to our Redis, checked and noted like any other job.
"""

from __future__ import annotations

import base64
import json
import logging
from typing import Any

from celery import Celery, Task, states, uuid
from celery.app.task import Context
from celery.canvas import signature
from celery.result import AsyncResult
from celery.utils.functional import maybe_list
from kombu.compression import decompress

from cellama.tasks.connection.kombu_internals import (
    SHARING_PARTS,
    UnfitLibraries,
    require_parts,
    send_next_step,
    tasks_before_finalizing,
    tell_each_app,
)
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.contract.keys import job_key
from cellama.tasks.contract.shapes.results import Result
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Call, Ending, Message, Submission

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
    call, no_message = Call(task.name, [], {}, queue, 0, None, {}), Message("", "")
    ledger.submit([Submission(job_id, call, no_message)])  # whoever reads the step's stream is told as well
    ledger.end_waiting(job_id, events.error(failure.code, failure.message, failure.retryable))
    task.backend.mark_as_failure(job_id, failure, request=context)
    ledger.settle(job_id)
    return task.AsyncResult(job_id)


class ChordClaimed(RuntimeError):
    """A worker that may be dead has claimed the body of this chord; the end is settled once the claim has expired."""


def tell_end(app: Celery, job_id: str, ending: Ending) -> None:
    """Store for Celery how a job ended that no worker ran to its end, and send what follows the job in a canvas.

    A worker may have done a part of that before it died. Celery sends the next steps before it stores a success, so a
    stored success means that they have been sent. Everything else is repeated, except for the body of a chord that has
    run. Raises ChordClaimed.
    """
    found: Any = app.backend.client.hmget(job_key(job_id), "message", "stored")
    request, is_stored, event = request_of(found[0]), found[1] == states.SUCCESS.encode(), ending.event
    if request is not None and request.chord and app.backend.has_body_run(request):
        request.chord = None
    if event["type"] == "error":
        failure = JobFailed(event["code"], event["message"], event["retryable"])
        app.backend.mark_as_failure(job_id, failure, request=request)
    elif event["finish_reason"] == "cancelled":
        app.backend.mark_as_revoked(job_id, "cancelled", request=request)
    elif ending.result is not None:
        if request is not None and not is_stored:
            _send_next(app, request, ending.result)
        app.backend.mark_as_done(job_id, ending.result, request=request)
    if request is not None and request.chord and app.backend.is_chord_claimed(request):
        raise ChordClaimed(
            f"job {job_id}: the worker that was about to send the body of its chord has not reported back"
        )


def request_of(message: bytes | None) -> Context | None:
    """What Celery knows of a job while it runs it, from its message; None if that is none of Celery's."""
    if not message:
        return None
    try:
        stored = json.loads(message)
        headers, body = stored["headers"], base64.b64decode(stored["body"])
        if headers.get("compression"):
            body = decompress(body, headers["compression"])
        args, kwargs, canvas = json.loads(body)
    except (KeyError, TypeError, ValueError) as error:
        log.warning("a message says nothing of what follows its job: %s", error)
        return None
    return Context({**headers, **canvas}, args=args, kwargs=kwargs, delivery_info={})


def _send_next(app: Celery, request: Context, result: Result) -> None:
    """The callbacks of a job, and the next step of its chain, as Celery sends them (celery.app.trace)."""
    family = {"parent_id": request.id, "root_id": request.root_id}
    for callback in request.callbacks or ():
        send_next_step(app, signature(callback, app=app).apply_async, (result,), **family)
    if request.chain:
        *rest, step = request.chain
        send_next_step(app, signature(step, app=app).apply_async, (result,), chain=rest, **family)


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

"""How the end of a job reaches Celery.

| the job                           | who stores its end for Celery                                            |
|-----------------------------------|--------------------------------------------------------------------------|
| ends well, and nothing follows it | the script that writes its last event (`end_with_last_event`, write.lua) |
| ends well, and a canvas has more  | Celery, after the task has returned                                      |
| fails, or runs into a time limit  | Celery, after the task has raised                                        |
| is cancelled while it runs        | Celery, and the attempt once more if Celery's main thread could not      |
| ends where no worker runs it      | whoever ended it, or the reaper (`end_without_worker`)                   |
| is purged                         | the script that ends a page of waiting jobs (purge.lua)                  |

Where Celery stores the end, its ack of the message settles the job in the ledger (release.lua). If the worker dies
before that, the reaper does what is missing with `end_without_worker`.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import Celery, Task, states
from celery.app.task import Context, get_actual_ignore_result
from celery.canvas import signature
from kombu.compression import decompress

from cellama.tasks.connection.kombu_internals import send_next_step
from cellama.tasks.contract.all_kinds import Result
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.keys import job_key
from cellama.tasks.contract.names import TOKEN_HEADER
from cellama.tasks.state.records import CeleryState, Ending

from .pool import JobControl

log = logging.getLogger(__name__)

IS_STORED = "cellama_is_stored"  # attribute of a task's request: its result is in Redis


def started_state(task: Task) -> CeleryState | None:
    """What the script that begins an attempt stores for Celery: STARTED; None if no state of the task is kept."""
    request = task.request
    if get_actual_ignore_result(task, request):
        return None
    where = {"pid": os.getpid(), "hostname": request.hostname}
    stored: CeleryState = task.backend.stored(request.id, where, states.STARTED, request)
    return stored


# The job ends well, and nothing follows it


@dataclass(slots=True)
class CeleryEnd:
    """What the script that writes the last event of a job needs to end the job for Celery as well.

    `stored` returns what Celery keeps of a result, or None if the job ends in another way by now. `token` is that of
    the message, which is released.
    """

    stored: Callable[[Result], CeleryState | None]
    token: str
    result: Result | None = None  # once Celery has it, and the message is gone: nothing is left to do


def end_with_last_event(task: Task, control: JobControl) -> CeleryEnd | None:
    """The end that is written with the last event; None if something follows the job: the next steps of a canvas must
    be sent before the result is stored, in Celery's order."""
    request, shape, backend = task.request, task.kind.shape, task.backend
    if request.callbacks or request.chain or request.chord or get_actual_ignore_result(task, request):
        return None

    def stored(result: Result) -> CeleryState | None:
        if control.interruption is not None:  # Celery stores another end
            return None
        made: CeleryState = backend.stored(request.id, shape(result), states.SUCCESS, request)
        return made

    return CeleryEnd(stored, getattr(request, TOKEN_HEADER, ""))


def leave_nothing_to_celery(task: Task, end: CeleryEnd | None, control: JobControl) -> None:
    """Let Celery skip what the script with the last event has done: the result is stored and the message is gone."""
    if end is not None and end.result is not None:
        control.is_settled = True  # no ack (message.py)
        setattr(task.request, IS_STORED, True)


def is_stored_already(request: Any, state: str) -> bool:
    """Whether this state of a task was stored with the last event of its job."""
    return getattr(request, IS_STORED, False) and state == states.SUCCESS


# The job ended where no worker runs it, or its worker died after the end


class ChordClaimed(RuntimeError):
    """A worker that may be dead has claimed the body of this chord; the end is settled once the claim has expired."""


def end_without_worker(app: Celery, job_id: str, ending: Ending) -> None:
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
    """What Celery knows of a job while it runs it, from its message; None if the message is not one of Celery's."""
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

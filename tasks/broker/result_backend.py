"""Report the outcomes of jobs to Celery, and store them in Redis as Celery's results.

Which process stores the outcome of a job depends on how the job ends:

- The job succeeds, and no further steps follow. The script `write` stores the outcome with the last event
  (`end_with_last_event`).

- The job succeeds, and further steps of a canvas follow. Celery stores the outcome after the task has returned.

- The job fails, or exceeds a time limit. Celery stores the outcome after the task has raised an exception.

- The job is cancelled while it is running. Celery stores the outcome. If Celery's main thread could not store the
  outcome, the attempt stores it.

- The job ends while no worker is running it. The process that ended the job, or the reaper, stores the outcome
(`end_without_worker`).

- The job is purged. The script `purge` stores the outcomes of a page of waiting jobs.

If Celery stores the outcome, its acknowledgement of the message settles the job in the ledger (script `release`). If
the worker dies before the acknowledgement, the reaper completes the missing steps with `end_without_worker`.

Keys, values and channels are the same as in Celery's own backend, so every Celery app can read the results.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Celery, Task, states
from celery.app.task import Context
from celery.backends.redis import RedisBackend
from celery.canvas import signature
from celery.exceptions import BackendStoreError
from celery.result import AsyncResult
from kombu.compression import decompress
from redis import Redis
from redis.exceptions import RedisError

from cellama.config import get_settings, mask_url
from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import SOCKET_OPTIONS, connect
from cellama.tasks.connection.kombu_internals import HAS_PUBLISH_RETRY, send_next_step
from cellama.tasks.contract.all_kinds import Result
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.json_values import encode
from cellama.tasks.contract.keys import job_key
from cellama.tasks.contract.names import TOKEN_HEADER
from cellama.tasks.state.ledger import CeleryState, Ending, Ledger
from cellama.tasks.state.scripts import run_script
from cellama.tasks.state.unserved import UnservedJobs, UnservedWait

if TYPE_CHECKING:
    from .pool import JobControl

log = event_logger(__name__)

ID_PLACEHOLDER = "cellama-task-id"
INSPECT_S = 2.0  # for the replies of all workers; a worker replies within milliseconds unless its machine is overloaded
CHORD_CLAIM_S = 30  # how long only the worker that counted the last part of a chord may send its body
IS_STORED = "cellama_is_stored"  # attribute of a task's request; True if the result is in Redis


def started_state(task: Task) -> CeleryState | None:
    """Return the state STARTED, which the script `begin` stores for Celery, or None if the task ignores its result."""
    request = task.request
    if _ignores_result(task, request):
        return None
    process = {"pid": os.getpid(), "hostname": request.hostname}
    stored: CeleryState = task.backend.stored(request.id, process, states.STARTED, request)
    return stored


# The job succeeds, and nothing follows it


@dataclass(slots=True)
class CeleryEnd:
    """The data that the script `write` needs in order to store a job's outcome for Celery.

    `stored` converts a result into the state that Celery stores, or returns None if the job was interrupted in the
    meantime. `token` is the token of the message, which the script releases.
    """

    stored: Callable[[Result], CeleryState | None]
    token: str
    result: Result | None = None  # set once the result is stored and the message is released


def end_with_last_event(task: Task, control: JobControl) -> CeleryEnd | None:
    """Return the outcome to store with the last event, or None if further steps of a canvas follow the job.

    Celery sends the next steps of a canvas before it stores the result, and this order must be kept.
    """
    request, shape, backend = task.request, task.kind.shape, task.backend
    if request.callbacks or request.chain or request.chord or _ignores_result(task, request):
        return None

    def stored(result: Result) -> CeleryState | None:
        if control.interruption is not None:  # Celery stores another state
            return None
        state: CeleryState = backend.stored(request.id, shape(result), states.SUCCESS, request)
        return state

    return CeleryEnd(stored, getattr(request, TOKEN_HEADER, ""))


def skip_storing(task: Task, end: CeleryEnd | None, control: JobControl) -> None:
    """Make Celery skip the steps that the script has performed: storing the result and acknowledging the message."""
    if end is not None and end.result is not None:
        control.is_settled = True  # JobRequest then only forgets the message
        setattr(task.request, IS_STORED, True)


def is_stored_already(request: Any, state: str) -> bool:
    """Return whether this state of a task was stored with the last event of its job."""
    return getattr(request, IS_STORED, False) and state == states.SUCCESS


# The job ended while no worker ran it, or its worker died after the end


class ChordClaimed(RuntimeError):
    """The chord's body is claimed by a worker that may have died.

    The job can be settled once the claim has expired.
    """


def end_without_worker(app: Celery, job_id: str, ending: Ending) -> None:
    """Store the outcome of a job that no worker completed, and send the next steps of its canvas.

    A worker may have completed some of these steps before it died. Celery sends the next steps before it stores a
    success, so a stored success means that these steps have been sent. All other steps are repeated, except that a
    chord's body is not sent again if it has already run. Raises ChordClaimed.
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
        raise ChordClaimed(f"job {job_id}: a worker has claimed the body of its chord and has not sent it yet")


def _ignores_result(task: Task, request: Context) -> bool:
    """Return whether the result is ignored, as set by the call or else by the task (as in Celery 5.7)."""
    of_call = vars(request).get("ignore_result")  # the class has a default, which is not the caller's choice
    return bool(task.ignore_result if of_call is None else of_call)


def request_of(message: bytes | None) -> Context | None:
    """Return the context that Celery creates from a message when it runs the job, or None for a malformed message."""
    if not message:
        return None
    try:
        stored = json.loads(message)
        headers, body = stored["headers"], base64.b64decode(stored["body"])
        if headers.get("compression"):
            body = decompress(body, headers["compression"])
        args, kwargs, canvas = json.loads(body)
    except (KeyError, TypeError, ValueError) as error:
        log.warning("malformed message ignored", detail=f"{error!r}; the job's next steps are not sent")
        return None
    return Context({**headers, **canvas}, args=args, kwargs=kwargs, delivery_info={})


def _send_next(app: Celery, request: Context, result: Result) -> None:
    """Send a job's callbacks and the next step of the job's chain, as Celery does (celery.app.trace)."""
    parents = {"parent_id": request.id, "root_id": request.root_id}
    for callback in request.callbacks or ():
        send_next_step(app, signature(callback, app=app).apply_async, (result,), **parents)
    if request.chain:
        *rest, step = request.chain
        send_next_step(app, signature(step, app=app).apply_async, (result,), chain=rest, **parents)


def queues_read(app: Celery) -> set[str]:
    """Ask all Celery workers in this database for the queues that they read, and return the queue names."""
    replies: dict[str, Any] = app.control.inspect(timeout=INSPECT_S).active_queues() or {}
    return {queue["name"] for queues in replies.values() for queue in queues}


def _awaited_ids(result: Any) -> Iterator[str]:
    """Yield the ids of the jobs in a result, a group or a chain."""
    while result is not None:
        for part in getattr(result, "results", None) or [result]:
            if isinstance(part, AsyncResult):
                yield part.id
        result = result.parent


class ResultBackend(RedisBackend):  # type: ignore[misc]
    """Celery's result backend, which stores a state with one script instead of two round trips. Thread-safe."""

    def __init__(self, *args: Any, app: Any, url: str | None = None, **options: Any) -> None:
        """Connect to `url`, or by default to the app's Redis.

        The URL is not in Celery's configuration, because `inspect conf` would reveal the passwords in some URLs.
        """
        super().__init__(*args, app=app, url=url or app.redis_url or get_settings().redis_url, **options)

    def _params_from_url(self, url: str, defaults: dict[str, Any]) -> dict[str, Any]:
        """Return an empty dict, because only `connect` parses URLs."""
        return {}

    def _create_client(self, **_: Any) -> Redis:
        return connect(self.url, **SOCKET_OPTIONS)

    def as_uri(self, include_password: bool = False) -> str:
        url: str = self.url
        return url if include_password else mask_url(url)

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **_: Any
    ) -> Any:
        """Store a state as Celery's KeyValueStoreBackend does, with the same retries. Raises BackendStoreError.

        Do nothing if the result was stored with the last event of the job.
        """
        if is_stored_already(request, state):
            return result
        value = self._value(task_id, result, state, traceback, request)
        if len(value) > self._MAX_STR_VALUE_SIZE:
            raise BackendStoreError("the result is too large for Redis", state=state, task_id=task_id)
        failure_expires = getattr(self, "failure_expires", self.expires)  # Celery has it since version 5.7
        expires = failure_expires if state == states.FAILURE else self.expires
        keys = [self.get_key_for_task(task_id), job_key(task_id)]
        args = [value, expires or "", state if state in states.READY_STATES else ""]
        self.ensure(self._run, (keys, args))
        return result

    def on_chord_part_return(self, request: Any, state: str, result: Any, *args: Any, **options: Any) -> Any:
        """Count a part of a chord as Celery does, but retry while Redis is unreachable. No part is counted twice.

        With Celery before 5.7, this method counts the part without retries.
        """
        count = super().on_chord_part_return
        if not HAS_PUBLISH_RETRY:
            return count(request, state, result, *args, **options)
        return self._ensure_retryable(count, request, state, result, *args, **options)

    def stored(self, task_id: str, result: Any, state: str, request: Any) -> CeleryState:
        """Encode a task's state as the value that a script stores for Celery.

        Raises the errors of `encode`.
        """
        value = self._value(task_id, result, state, None, request)
        return CeleryState(value if isinstance(value, bytes) else value.encode(), self.expires)

    def value_around_id(self, error: Exception, state: str) -> tuple[bytes, bytes]:
        """Return the value that Celery stores for a failed task, split into the parts before and after the task id."""
        stored = self.stored(ID_PLACEHOLDER, self.encode_result(error, state), state, None)
        before, _, after = stored.value.partition(ID_PLACEHOLDER.encode())
        return before, after

    def _value(self, task_id: str, result: Any, state: str, traceback: Any, request: Any) -> bytes | str:
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        return self._encoded({**meta, "task_id": task_id})

    def _encoded(self, meta: dict[str, Any]) -> bytes | str:
        """Encode a result as Celery does, but faster, because vectors are already encoded."""
        try:
            return encode(meta)
        except TypeError:  # a user's own task can return dates or decimals
            return self.encode(meta)  # type: ignore[no-any-return]

    def _chord_publish_claim_expires(self, initial_expires: int, callback: Any) -> int:
        """Return the lifetime of a chord claim in seconds.

        Celery's own default would allow for thousands of retries.
        """
        return max(initial_expires, CHORD_CLAIM_S)

    def is_chord_claimed(self, request: Any) -> bool:
        """Return whether a worker has claimed the body of this job's chord and has not sent it yet.

        Celery deletes a chord's size once the chord's body has been sent or the chord has failed.
        """
        claim, size = self.client.mget(
            self.get_key_for_group(request.group, ".c"), self.get_key_for_group(request.group, ".s")
        )
        return claim not in (None, b"done") and size is not None

    def has_body_run(self, request: Any) -> bool:
        """Return whether the body of this job's chord has a final state."""
        body_id = request.chord["options"].get("task_id")
        return body_id is not None and self.get_state(body_id) in states.READY_STATES

    def _wait_for_pending(self, result: Any, on_interval: Any = None, **options: Any) -> Any:
        """Wait as Celery does, and end the awaited jobs if no worker serves them."""
        wait = self.unserved_wait()

        def check() -> None:
            if wait.is_due:
                wait.check(_awaited_ids(result))
            if on_interval is not None:
                on_interval()

        return super()._wait_for_pending(result, on_interval=check, **options)

    def unserved_wait(self) -> UnservedWait:
        """Return an `UnservedWait` for a caller that is starting to wait for results."""
        settings, redis, store = get_settings(), self.client, partial(end_without_worker, self.app)
        jobs = UnservedJobs(
            redis,
            Ledger(redis, settings=settings),
            store,
            timeout_s=settings.unserved_timeout_s,
            lease_s=settings.lease_s,
            queues_read=partial(queues_read, self.app),
        )
        return UnservedWait(jobs)

    def remove_pending_result(self, result: Any) -> Any:
        """Unsubscribe from a result when it is garbage collected, as Celery does.

        While Redis is unreachable or the interpreter exits, there is no subscription to cancel.
        """
        if not sys.is_finalizing():
            with contextlib.suppress(RedisError, RuntimeError):  # Celery raises RuntimeError after its last retry
                super().remove_pending_result(result)
        return result

    def _run(self, keys: list[Any], args: list[Any]) -> Any:
        return run_script(self.client, "store_result", keys, args)

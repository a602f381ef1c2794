"""One run of one job in a worker: whatever happens, its stream ends once and Celery hears the right thing.

| what happens                     | stream ends with   | Celery state            |
|----------------------------------|--------------------|-------------------------|
| finished, or `timeout` reached   | done               | SUCCESS                 |
| revoked, or cancelled in Redis   | done, `cancelled`  | REVOKED                 |
| soft or hard time limit          | done, `timeout`    | FAILURE                 |
| wrong payload, engine error, bug | error              | FAILURE with JobFailed  |
| it ended workers again and again | error, `dead`      | FAILURE with JobFailed  |
| the worker ends before it does   | (goes on elsewhere)| none, message is queued |
| the ledger does not know it      | error              | FAILURE with JobFailed  |
| another attempt has begun        | (that one's end)   | none: the other sets it |
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Self, TypeVar

from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from redis.exceptions import RedisError

from cellama.engine import (
    EngineError,
    Model,
    UnknownModel,
)
from cellama.tasks.broker.pool import Interruption, current_job
from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.connection.redis_waits import redis_waits
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.contract.names import DEFAULT_MODEL, SUBMITTED_AT_HEADER, TOKEN_HEADER
from cellama.tasks.contract.shapes.results import (
    Result,
    Usage,
)
from cellama.tasks.publishing.results import error_event, failure_of
from cellama.tasks.state.foundation import (
    Choice,
    Foundation,
    changed,
    foundation_of,
    grammar_changed,
    may_come,
)
from cellama.tasks.state.history import Past, read_past
from cellama.tasks.state.ledger import new_run
from cellama.tasks.state.records import DEAD, Attempt
from cellama.tasks.state.registry import llguidance_version, recent_workers

from .celery_words import celery_end_of, settle, started_for_celery
from .took import note_took

if TYPE_CHECKING:
    from cellama.tasks.worker.runtime import Runtime

log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_S = 0.5
ELSEWHERE_S = 1.0  # before a job is handed back that this worker can't go on with
DEAD_MESSAGE = (
    "its worker died {} times in a row while it ran, before it had a token; see the workers' logs, and "
    "`cellama dead requeue` to try again"
)
TRIMMED_MESSAGE = (
    "a worker started it, and Redis no longer has all that it generated: the journal was longer than "
    "CELLAMA_JOURNAL_MAX_EVENTS, or was evicted or deleted; send the job again"
)
UNKNOWN_MESSAGE = (
    "Redis knows nothing of job {}: it ended long ago, or its entry was deleted or evicted, or plain Celery sent it "
    "with the header {}, which is cellama's own; send it again as a new job, without that header"
)
GIVEN_UP = (Interruption.HANDED_BACK, Interruption.SUPERSEDED)  # the run's end is not the job's


class JobAttempt:
    """One attempt at a job, of whichever kind: what each kind does is in handlers.py. Pool thread only."""

    def __init__(self, task: Task, runtime: Runtime) -> None:
        self.job_id: str = task.request.id
        self._task = task
        self.runtime = runtime
        self.control = current_job()
        self.attempt: Attempt
        self.ended: Future[bool]  # whether the terminal event of this run counts
        self.engine_ends_stream = False
        self.celery_end = celery_end_of(task, self.control)
        self.past = Past()
        self._held = contextlib.ExitStack()  # the model, until the run ends
        self.submitted_at = time.monotonic()  # once it has begun, as Redis' clock has it

    def execute(self, streams: bool, body: Callable[[Self], Result]) -> Result:
        """The result of `body`. Raises what Celery expects: JobFailed, Ignore, Reject, SoftTimeLimitExceeded."""
        run = new_run()
        with self._passed_quarantine(alone=False) as prove:
            attempt = self._begin(run, alone=False)
            if attempt.verdict != "suspect":
                return self._run(attempt, streams, body, prove)
        with self._passed_quarantine(alone=True) as prove:
            return self._run(self._begin(run, alone=True), streams, body, prove)

    def _passed_quarantine(self, *, alone: bool) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return self.runtime.quarantine.passed(lambda: self.control.interruption is not None, alone=alone)

    def _begin(self, run: str, *, alone: bool) -> Attempt:
        if self.control.interruption is Interruption.HANDED_BACK:
            raise Reject("the worker ends", requeue=True)
        ledger, worker, request = self.runtime.ledger, self.runtime.incarnation, self._task.request
        token = getattr(request, TOKEN_HEADER, "")  # Celery makes attributes of message headers
        started = started_for_celery(self._task)
        attempt = self.reaching_redis(
            lambda: ledger.begin(self.job_id, run, worker, token=token, alone=alone, started=started)
        )
        self.submitted_at = time.monotonic() - attempt.waited_s
        return attempt

    def _run(
        self, attempt: Attempt, streams: bool, body: Callable[[Self], Result], on_token: Callable[[], None]
    ) -> Result:
        self.attempt = attempt
        if attempt.verdict == "superseded":  # so its message is not acked
            self.control.interrupt(Interruption.SUPERSEDED)
            raise Ignore()
        if attempt.verdict == "gone":
            raise self._unknown()
        if attempt.verdict == "done":  # a copy; Celery gets the end from the worker that had it, or the reaper
            raise Ignore()
        if attempt.number > 1:
            self.past = self.reaching_redis(lambda: read_past(self.runtime.redis, self.job_id))
            self.past.trimmed |= self.past.next_seq < attempt.next_seq
        watching = self.runtime.watchers.watching(self._task, attempt, self.control, self.submitted_at)
        with self.runtime.running(attempt, self.control), self._held, watching as tell_result:
            self.ended = self.runtime.publisher.open(
                attempt,
                attempt.next_seq,
                streams=streams,
                started=self.past.started,
                on_token=on_token,
                celery_end=self.celery_end,
            )
            began_at = time.monotonic()
            result = self._execute(body)
            tell_result(result)
            if attempt.number == 1:
                note_took(self.runtime, self._task, result, time.monotonic() - began_at)
            settle(self._task, self.celery_end, self.control)
            return result

    def reaching_redis(self, action: Callable[[], T]) -> T:
        """Wait while Redis does not answer, or refuses commands for now.

        The worker's end hands the job back meanwhile, and limits end it.

        Raises JobFailed if Redis refuses what is asked for good, because asking again would not help.
        """
        with redis_waits.of(f"job {self.job_id}") as waits:
            while True:
                try:
                    return action()
                except RedisError as error:
                    if not is_passing(error):
                        said = f"Redis refuses what the worker asks of it: {error}"
                        raise JobFailed("redis_refused", said) from None
                    waits(error)
                if self.control.interruption is Interruption.HANDED_BACK:
                    raise Reject("the worker ends", requeue=True)
                if self.control.interruption in (Interruption.SOFT_LIMIT, Interruption.HARD_LIMIT):
                    self.raise_if_interrupted()
                time.sleep(RETRY_S)

    def _execute(self, body: Callable[[Self], Result]) -> Result:
        try:
            if self.attempt.verdict == "dead":
                raise JobFailed(DEAD, DEAD_MESSAGE.format(self.attempt.num_failures - 1))
            if self.attempt.verdict == "cancelled":
                self.control.interrupt(Interruption.CANCELLED)
            self.raise_if_interrupted()
            if self.past.trimmed:
                raise JobFailed("stream_trimmed", TRIMMED_MESSAGE)
            result = body(self)
        except (Ignore, Reject, SoftTimeLimitExceeded):
            if self.control.interruption is Interruption.HANDED_BACK:
                self._hand_back()
            if self.control.interruption is Interruption.SUPERSEDED:
                self.runtime.publisher.hand_back(self.attempt.run_id)  # a Redis of yesterday would take its end
                self.ended.result()
                raise Ignore() from None
            cancelled = self.control.interruption is Interruption.CANCELLED
            self.end_stream(events.done("cancelled" if cancelled else "timeout", self._usage_so_far()))
            self._ignore_unless_mine()
            if cancelled:
                self._task.backend.mark_as_revoked(self.job_id, "cancelled", self._task.request)
            raise
        except EngineError as error:
            raise self._fail(failure_of(error)) from None
        except (InvalidJob, JobFailed) as error:
            raise self._fail(JobFailed(error.code, str(error), error.retryable)) from None
        except Exception as error:
            log.exception("job %s failed in an unforeseen way", self.job_id)
            raise self._fail(JobFailed("internal_error", f"{type(error).__name__}: {error}")) from None
        self._ignore_unless_mine()
        return result

    def _fail(self, failure: JobFailed) -> JobFailed:
        log.info("job %s failed: %s: %s", self.job_id, failure.code, failure)
        self.end_stream(error_event(failure))
        self._ignore_unless_mine()
        return failure

    @property
    def celery_has_result(self) -> bool:
        """Whether Celery has heard of the job's end with its last event: no other end counts then."""
        return self.celery_end is not None and self.celery_end.result is not None

    def end_stream(self, event: events.Event, result: Result | None = None) -> None:
        """The last event of the job's stream, unless the engine tells it."""
        if not self.engine_ends_stream:
            self.runtime.publisher.publish(self.attempt.run_id, event, result)

    def _ignore_unless_mine(self) -> None:
        """Waits until the terminal event is in Redis; raises Ignore if another attempt has the job."""
        if not self.ended.result():
            if self.control.interruption is Interruption.HANDED_BACK:  # it came to its end meanwhile, too late
                self._hand_back()
            raise Ignore()

    def _hand_back(self) -> None:
        """Raises Reject, so that the message is queued again, once everything that was generated is in the journal."""
        self.runtime.publisher.hand_back(self.attempt.run_id)
        self.ended.result()
        try:
            self.runtime.ledger.hand_back(self.attempt)
        except RedisError as error:
            log.warning("job %s is not handed back: %s; it is recovered when its lease ends", self.job_id, error)
        raise Reject("the worker ends", requeue=True)

    def _usage_so_far(self) -> Usage:
        return self.past.usage

    def _unknown(self) -> JobFailed:
        """The end of what says that it is in the ledger, and is not: the copy of a job that is forgotten, or a message
        of plain Celery under a header of ours. Raises Ignore if Celery knows an end."""
        if self.reaching_redis(self._task.AsyncResult(self.job_id).ready):
            raise Ignore()
        failure = JobFailed("unknown_job", UNKNOWN_MESSAGE.format(self.job_id, SUBMITTED_AT_HEADER))
        self.reaching_redis(lambda: self.runtime.ledger.end_unknown(self.job_id, error_event(failure)))
        return failure

    def sampling_defaults(self, model: Model) -> Mapping[str, object]:
        """Those of the model, as the first attempt had them."""
        return model.options.sampling_defaults if self.past.foundation is None else self.past.foundation.sampling

    def foundation(
        self, model: Model, asked: str, choice: Choice | None, also: Iterable[str] = (), *, is_constrained: bool
    ) -> Foundation:
        """What this attempt rests on: the same as the first one, or nothing at all. Raises Ignore, JobFailed."""
        begun, here = self.past.foundation, llguidance_version()
        if begun is None:
            begun = foundation_of(model, choice, also)
            begun = replace(begun, llguidance=here) if is_constrained else begun
        elif is_constrained and begun.llguidance is None:  # it began in a version that had other code for that
            begun = replace(begun, llguidance="")
        if begun.is_in(model) and begun.llguidance in (None, here):
            self.runtime.publisher.describe(self.attempt.run_id, begun.details())
            return begun
        workers = self.reaching_redis(lambda: recent_workers(self.runtime.redis))
        if not may_come(workers, asked, begun):
            has_model = may_come(workers, asked, replace(begun, llguidance=None))
            raise grammar_changed(begun, here) if has_model else changed(asked)
        log.info(
            "job %s waits for a worker with the model, the adapters and the version of llguidance that it began with",
            self.job_id,
        )
        time.sleep(ELSEWHERE_S)
        self.control.interrupt(Interruption.HANDED_BACK)
        raise Ignore()

    def model(self, model_id: str) -> Model:
        """The job's model, which stays until the attempt ends. Raises UnknownModel, or Ignore if it is leaving."""
        begun = self.past.foundation
        if begun is not None and model_id == DEFAULT_MODEL:  # it may be another one by now
            models = self.runtime.manager.models()
            model_id = next((name for name, model in models.items() if begun.is_in(model)), model_id)
        try:
            return self._held.enter_context(self.runtime.manager.hold(model_id))
        except UnknownModel:
            if not self.runtime.manager.is_leaving(model_id):
                raise
        self.control.interrupt(Interruption.HANDED_BACK)  # others serve it, or this worker does again
        raise Ignore()

    def raise_if_interrupted(self) -> None:
        """Raises what Celery expects of a job that it ended itself; it has stored revokes and hard limits already."""
        if self.control.interruption is Interruption.SOFT_LIMIT:
            raise SoftTimeLimitExceeded()
        if self.control.interruption is not None:
            raise Ignore()


def end_revoked(runtime: Runtime, job_id: str) -> None:
    """Ends the stream of a job that was revoked before anything of it ran here."""
    runtime.ledger.cancel(job_id, running=True)

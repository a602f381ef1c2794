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
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from redis.exceptions import RedisError, ResponseError

from cellama.engine import (
    Completion,
    EmbeddingCancelled,
    EmbeddingHandle,
    EngineError,
    Handle,
    Model,
    UnknownAdapter,
    UnknownModel,
)
from cellama.tasks.broker.pool import Interruption, current_job
from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.contract import events
from cellama.tasks.contract.chunks import ChunkJob
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.contract.names import DEFAULT_MODEL, SUBMITTED_AT_HEADER, TOKEN_HEADER
from cellama.tasks.contract.payloads import (
    ApplyChatTemplateJob,
    ChatJob,
    DetokenizeJob,
    EmbedJob,
    GenerateJob,
    RerankJob,
    TokenizeJob,
)
from cellama.tasks.contract.shapes.results import (
    ChunkResult,
    EmbedResult,
    RerankResult,
    Result,
    Usage,
    usage_of,
    with_messages,
)
from cellama.tasks.publishing.results import error_event, failure_of, result_of, resume_of
from cellama.tasks.state.foundation import Choice, Foundation, changed, foundation_of, may_come
from cellama.tasks.state.history import Past, read_past
from cellama.tasks.state.ledger import new_run
from cellama.tasks.state.records import DEAD, Attempt, Ending
from cellama.tasks.state.registry import KEPT_S, live_workers

from .bulk_slice import ChunkRun, adapters_of_lines
from .engine_request import Asked, conversation_of, request_of
from .vectors import embed, rerank, wait_for

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
UNKNOWN_MESSAGE = (
    "Redis knows nothing of job {}: it ended long ago, or its entry was deleted or evicted, or plain Celery sent it "
    "with the header {}, which is cellama's own; send it again as a new job, without that header"
)
GIVEN_UP = (Interruption.HANDED_BACK, Interruption.SUPERSEDED)  # the run's end is not the job's
MOST_URGENT = 0  # a suspect gets a slot at once: it shall not be blamed for a death while it only waited


class JobRun:
    """A job on its way through the engine. Pool thread only."""

    def __init__(self, task: Task, runtime: Runtime) -> None:
        self._job_id: str = task.request.id
        self._task = task
        self._runtime = runtime
        self._control = current_job()
        self._attempt: Attempt
        self._ended: Future[bool]  # whether the terminal event of this run counts
        self._engine_ends_stream = False
        self._past = Past()
        self._held = contextlib.ExitStack()  # the model, until the run ends
        self._submitted_at = time.monotonic()  # once it has begun, as Redis' clock has it

    def execute(self, streams: bool, body: Callable[[JobRun], Result]) -> Result:
        """The result of `body`. Raises what Celery expects: JobFailed, Ignore, Reject, SoftTimeLimitExceeded."""
        run = new_run()
        with self._passed_quarantine(alone=False) as prove:
            attempt = self._begin(run, alone=False)
            if attempt.verdict != "suspect":
                return self._run(attempt, streams, body, prove)
        with self._passed_quarantine(alone=True) as prove:
            return self._run(self._begin(run, alone=True), streams, body, prove)

    def _passed_quarantine(self, *, alone: bool) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return self._runtime.quarantine.passed(lambda: self._control.interruption is not None, alone=alone)

    def _begin(self, run: str, *, alone: bool) -> Attempt:
        if self._control.interruption is Interruption.HANDED_BACK:
            raise Reject("the worker ends", requeue=True)
        ledger, worker, request = self._runtime.ledger, self._runtime.incarnation, self._task.request
        token = getattr(request, TOKEN_HEADER, "")  # Celery makes attributes of message headers
        attempt = self._reaching_redis(lambda: ledger.begin(self._job_id, run, worker, token=token, alone=alone))
        self._submitted_at = time.monotonic() - attempt.waited_s
        return attempt

    def _run(
        self, attempt: Attempt, streams: bool, body: Callable[[JobRun], Result], on_token: Callable[[], None]
    ) -> Result:
        self._attempt = attempt
        if attempt.verdict == "superseded":  # so its message is not acked
            self._control.interrupt(Interruption.SUPERSEDED)
            raise Ignore()
        if attempt.verdict == "gone":
            raise self._unknown()
        if attempt.verdict == "done":
            return self._result_of(attempt.ending)
        if attempt.number > 1:
            self._past = self._reaching_redis(lambda: read_past(self._runtime.redis, self._job_id))
        with self._runtime.running(attempt, self._control), self._held:
            self._ended = self._runtime.publisher.open(
                attempt, self._past.next_seq, streams=streams, started=self._past.started, on_token=on_token
            )
            return self._execute(body)

    def _reaching_redis(self, action: Callable[[], T]) -> T:
        """Waits out an outage of Redis; the worker's end hands the job back, and limits end it.

        Raises JobFailed if Redis refuses what is asked, because asking again would not help.
        """
        while True:
            try:
                return action()
            except RedisError as error:
                if isinstance(error, ResponseError) and not is_passing(error):
                    raise JobFailed("redis_refused", f"Redis refuses what the worker asks of it: {error}") from None
                log.warning("job %s waits for Redis: %s", self._job_id, error)
            if self._control.interruption is Interruption.HANDED_BACK:
                raise Reject("the worker ends", requeue=True)
            if self._control.interruption in (Interruption.SOFT_LIMIT, Interruption.HARD_LIMIT):
                self._raise_if_interrupted()
            time.sleep(RETRY_S)

    def _execute(self, body: Callable[[JobRun], Result]) -> Result:
        try:
            if self._attempt.verdict == "dead":
                raise JobFailed(DEAD, DEAD_MESSAGE.format(self._attempt.num_failures - 1))
            if self._past.trimmed:
                raise JobFailed("stream_trimmed", "its worker died, and what it had done is beyond journal_max_events")
            if self._attempt.verdict == "cancelled":
                self._control.interrupt(Interruption.CANCELLED)
            self._raise_if_interrupted()
            result = body(self)
        except (Ignore, SoftTimeLimitExceeded):
            if self._control.interruption is Interruption.HANDED_BACK:
                self._hand_back()
            if self._control.interruption is Interruption.SUPERSEDED:
                self._runtime.publisher.hand_back(self._attempt.run_id)  # a Redis of yesterday would take its end
                self._ended.result()
                raise Ignore() from None
            cancelled = self._control.interruption is Interruption.CANCELLED
            self._end_stream(events.done("cancelled" if cancelled else "timeout", self._usage_so_far()))
            self._ignore_unless_mine()
            if cancelled:
                self._task.backend.mark_as_revoked(self._job_id, "cancelled", self._task.request)
            raise
        except EngineError as error:
            raise self._fail(failure_of(error)) from None
        except (InvalidJob, JobFailed) as error:
            raise self._fail(JobFailed(error.code, str(error), error.retryable)) from None
        except Exception as error:
            log.exception("job %s failed in a way that nobody foresaw", self._job_id)
            raise self._fail(JobFailed("internal_error", f"{type(error).__name__}: {error}")) from None
        self._ignore_unless_mine()
        return result

    def _fail(self, failure: JobFailed) -> JobFailed:
        self._end_stream(error_event(failure))
        self._ignore_unless_mine()
        return failure

    def _end_stream(self, event: events.Event, result: Result | None = None) -> None:
        if not self._engine_ends_stream:
            self._runtime.publisher.publish(self._attempt.run_id, event, result)

    def _ignore_unless_mine(self) -> None:
        """Waits until the terminal event is in Redis; raises Ignore if another attempt has the job."""
        if not self._ended.result():
            if self._control.interruption is Interruption.HANDED_BACK:  # it came to its end meanwhile, too late
                self._hand_back()
            raise Ignore()

    def _hand_back(self) -> None:
        """Raises Reject, so that the message is queued again, once everything that was generated is in the journal."""
        self._runtime.publisher.hand_back(self._attempt.run_id)
        self._ended.result()
        try:
            self._runtime.ledger.hand_back(self._attempt)
        except RedisError as error:
            log.warning("job %s is not handed back: %s; it is recovered when its lease ends", self._job_id, error)
        raise Reject("the worker ends", requeue=True)

    def _usage_so_far(self) -> Usage:
        return self._past.usage

    def _result_of(self, ending: Ending | None) -> Result:
        """What Celery is told of a job that had ended before: its worker died before it could, or none had it."""
        event = None if ending is None else ending.event
        if event is not None and event["type"] == "error":
            raise JobFailed(event["code"], event["message"], event["retryable"])
        if event is not None and event["finish_reason"] == "cancelled":
            self._task.backend.mark_as_revoked(self._job_id, "cancelled", self._task.request)
            raise Ignore()
        if ending is not None and ending.result is not None:
            return ending.result
        if self._task.AsyncResult(self._job_id).ready():
            raise Ignore()
        raise JobFailed("result_lost", f"job {self._job_id} has ended, and nobody knows its result any more")

    def _unknown(self) -> JobFailed:
        """The end of what says that it is in the ledger, and is not: the copy of a job that is forgotten, or a message
        of plain Celery under a header of ours. Raises Ignore if Celery knows an end."""
        if self._reaching_redis(self._task.AsyncResult(self._job_id).ready):
            raise Ignore()
        failure = JobFailed("unknown_job", UNKNOWN_MESSAGE.format(self._job_id, SUBMITTED_AT_HEADER))
        self._reaching_redis(lambda: self._runtime.ledger.end_unknown(self._job_id, error_event(failure)))
        return failure

    def _foundation(self, model: Model, asked: str, choice: Choice | None, also: Iterable[str] = ()) -> Foundation:
        """What this attempt rests on: the same as the first one, or nothing at all. Raises Ignore, JobFailed."""
        begun = self._past.foundation
        if begun is None:
            begun = foundation_of(model, choice, also)
            self._runtime.publisher.describe(self._attempt.run_id, begun.details())
            return begun
        if begun.is_in(model):
            return begun
        workers = self._reaching_redis(lambda: live_workers(self._runtime.redis, within_s=KEPT_S))
        if not may_come(workers, asked, begun):
            raise changed(asked)
        log.info("job %s waits for a worker with the model and the adapters that it began with", self._job_id)
        time.sleep(ELSEWHERE_S)
        self._control.interrupt(Interruption.HANDED_BACK)
        raise Ignore()

    def generate(self, job: GenerateJob) -> Result:
        model = self._model(job.model)
        return result_of(self._complete(model, job), model.id, self._runtime.signer)

    def chat(self, job: ChatJob) -> Result:
        model = self._model(job.model)
        return with_messages(result_of(self._complete(model, job), model.id, self._runtime.signer))

    def embed(self, job: EmbedJob) -> Result:
        return self._end_with(embed(self._model(job.model), job, self._wait_for))

    def rerank(self, job: RerankJob) -> Result:
        return self._end_with(rerank(self._model(job.model), job, self._wait_for))

    def chunk(self, job: ChunkJob) -> Result:
        model = self._model(job.model)
        choice = self._foundation(model, job.model, None, adapters_of_lines(job)).choice
        lines = ChunkRun(model, job, self._attempt.run_id, self._past, self._runtime, choice)
        self._control.when_interrupted(lambda reason: self._stop_lines(lines, reason))
        self._ended.add_done_callback(lambda _: lines.stop())
        lines.run()
        self._raise_if_interrupted()
        return self._end_with({"lines": len(job.lines), "usage": usage_of(), "model": model.id})

    def _stop_lines(self, lines: ChunkRun, reason: Interruption) -> None:
        if reason in GIVEN_UP:
            self._runtime.publisher.hand_back(self._attempt.run_id)
        lines.stop()

    def _end_with(self, result: EmbedResult | RerankResult | ChunkResult) -> Result:
        self._end_stream(events.done("stop", result["usage"]), result)
        return result

    # What follows needs the vocabulary only, and no engine: it waits for nobody.

    def tokenize(self, job: TokenizeJob) -> Result:
        model = self._model(job.model)
        tokens = model.tokenize(job.text, add_special=job.add_special, parse_special=job.parse_special)
        return self._end_light({"tokens": tokens, "model": model.id})

    def detokenize(self, job: DetokenizeJob) -> Result:
        model = self._model(job.model)
        return self._end_light({"text": model.detokenize(job.tokens), "model": model.id})

    def apply_chat_template(self, job: ApplyChatTemplateJob) -> Result:
        model = self._model(job.model)
        prompt = model.prepare_chat(*conversation_of(job))
        return self._end_light({"prompt": prompt.text, "tokens": prompt.tokens, "model": model.id})

    def _end_light(self, result: Result) -> Result:
        self._end_stream(events.done("stop", usage_of()), result)
        return result

    def _model(self, model_id: str) -> Model:
        begun = self._past.foundation
        if begun is not None and model_id == DEFAULT_MODEL:  # it may be another one by now
            models = self._runtime.manager.models()
            model_id = next((name for name, model in models.items() if begun.is_in(model)), model_id)
        try:
            return self._held.enter_context(self._runtime.manager.hold(model_id))
        except UnknownModel:
            if not self._runtime.manager.is_leaving(model_id):
                raise
        self._control.interrupt(Interruption.HANDED_BACK)  # others serve it, or this worker does again
        raise Ignore()

    def _complete(self, model: Model, job: GenerateJob | ChatJob) -> Completion:
        rests_on = self._foundation(model, job.model, job.adapters)
        chosen = self._past.foundation is None and job.adapters is not None
        asked = Asked(
            id=self._attempt.run_id,
            submitted_at=self._submitted_at,
            adapters=job.adapters or () if chosen else rests_on.choice,
            seed=self._seed_of(job),
            priority=MOST_URGENT if self._attempt.num_failures > 1 else job.priority,
            resume=resume_of(self._past, job.n),
        )
        try:
            handle = model.engine.submit(request_of(model, job, asked, self._runtime.signer))
        except UnknownAdapter:
            if chosen:
                raise
            self._control.interrupt(Interruption.HANDED_BACK)  # one of the model's own went just now
            raise Ignore() from None
        self._engine_ends_stream = True
        self._control.when_interrupted(lambda reason: self._stop(handle, reason))
        completion = handle.result()
        log.info(
            "job %s on %s: %s, %d + %d tokens in %.0f ms",
            *(self._job_id, model.id, completion.finish_reason),
            *(completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.timings.duration_ms),
        )
        if completion.finish_reason in ("cancelled", "timeout"):
            self._raise_if_interrupted()
        return completion

    def _seed_of(self, job: GenerateJob | ChatJob) -> int | None:
        """That of earlier attempts, or the job's own; else one that each attempt would choose, even if Redis has
        forgotten the others in a failover."""
        if self._past.seed is not None or job.seed is not None:
            return self._past.seed
        return zlib.crc32(self._job_id.encode()) & 0x7FFFFFFF

    def _stop(self, handle: Handle, reason: Interruption) -> None:
        if reason in GIVEN_UP:  # nobody shall hear of this end
            self._runtime.publisher.hand_back(self._attempt.run_id)
        handle.cancel("timeout" if reason in (Interruption.SOFT_LIMIT, Interruption.HARD_LIMIT) else "cancelled")

    def _wait_for(self, handle: EmbeddingHandle, timeout_s: float | None) -> None:
        """Until the vectors are there. Raises what the run ends with otherwise."""
        self._control.when_interrupted(lambda _: handle.cancel())
        try:
            wait_for(handle, timeout_s, self._submitted_at)
        except EmbeddingCancelled:
            self._raise_if_interrupted()
            raise

    def _raise_if_interrupted(self) -> None:
        """Raises what Celery expects of a job that it ended itself; it has stored revokes and hard limits already."""
        if self._control.interruption is Interruption.SOFT_LIMIT:
            raise SoftTimeLimitExceeded()
        if self._control.interruption is not None:
            raise Ignore()


def attempt_job(runtime: Runtime, task: Task, streams: bool, body: Callable[[JobRun], Result]) -> Result:
    """Makes one attempt at a task's job; `body` does the work. Raises what Celery expects."""
    return JobRun(task, runtime).execute(streams, body)


def end_revoked(runtime: Runtime, job_id: str) -> None:
    """Ends the stream of a job that was revoked before anything of it ran here."""
    runtime.ledger.cancel(job_id, running=True)

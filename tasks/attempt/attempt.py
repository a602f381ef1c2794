"""Run one attempt at a job in a worker.

The job's stream always ends exactly once, and Celery stores the matching state.

A job that finishes, or reaches its `timeout`, ends its stream with `done`, and Celery's state is SUCCESS. A job that
was revoked, or cancelled in Redis, ends with `done` (`cancelled`), and the state is REVOKED. A job that reaches its
soft or hard time limit ends with `done` (`timeout`), and the state is FAILURE. A job with an invalid payload, an engine
error or a bug ends with `error`, and the state is FAILURE with JobFailed. A job that has crashed its workers repeatedly
ends with `error` (`dead`), and the state is FAILURE with JobFailed. A job that is missing from the ledger ends with
`error`, and the state is FAILURE with JobFailed. If the worker stops, the message is queued again, and another attempt
ends the stream and sets the state. If another attempt has started, that attempt ends the stream and sets the state.

`JobAttempt.execute` runs the whole attempt: it waits in the quarantine, starts the attempt in the ledger, calls the
handler for the kind of job (`HANDLERS`), and ends the attempt. Everything runs on the job's pool thread, except the
callbacks for interruptions.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from redis.exceptions import RedisError

from cellama.config.logging import event_logger
from cellama.engine import (
    EmbeddingCancelled,
    EmbeddingHandle,
    EngineError,
    Handle,
    Model,
    Request,
    UnknownAdapter,
    UnknownModel,
)
from cellama.tasks.broker.pool import Interruption, current_job
from cellama.tasks.broker.result_backend import end_with_last_event, skip_storing, started_state
from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.connection.redis_waits import redis_waits
from cellama.tasks.contract import events, names
from cellama.tasks.contract.all_kinds import Result
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.contract.kinds.chat import TASK_CHAT, ChatJob, with_messages
from cellama.tasks.contract.kinds.chunk import TASK_CHUNK, ChunkJob
from cellama.tasks.contract.kinds.embed import TASK_EMBED, EmbedJob
from cellama.tasks.contract.kinds.generate import TASK_GENERATE, GenerateJob, GenerateResult
from cellama.tasks.contract.kinds.prefill import TASK_PREFILL, PrefillJob, of_prefill
from cellama.tasks.contract.kinds.rerank import TASK_RERANK, RerankJob
from cellama.tasks.contract.kinds.tokens import (
    TASK_APPLY_CHAT_TEMPLATE,
    TASK_DETOKENIZE,
    TASK_TOKENIZE,
    DetokenizeJob,
    Piece,
    TemplateJob,
    TemplateResult,
    TokenizeJob,
    TokenizeResult,
)
from cellama.tasks.contract.payloads import BaseJob
from cellama.tasks.contract.shapes.results import Usage, usage_of
from cellama.tasks.middleware import AttemptContext, Middleware, context_of
from cellama.tasks.publishing.publisher import AttemptStream
from cellama.tasks.publishing.results import error_event, failure_of, result_of, resume_of
from cellama.tasks.state.history import (
    Choice,
    Past,
    Provenance,
    grammar_changed,
    have_adapters,
    may_be_served,
    model_changed,
    provenance_of,
    read_past,
)
from cellama.tasks.state.ledger import DEAD, Attempt, new_run
from cellama.tasks.state.registry import live_workers, llguidance_version, recent_workers
from cellama.tasks.worker.signing import conversation_of

from .bulk_slice import ChunkRun, adapters_of_lines, has_constrained_lines
from .engine_request import RequestExtras, has_seed, is_constrained, parent_tokens, prefill_of, request_of, share_of
from .replay import ChatReplay
from .vectors import embed, rerank, wait_for

if TYPE_CHECKING:
    from cellama.tasks.worker.runtime import Runtime

log = event_logger(__name__)

T = TypeVar("T")

RETRY_S = 0.5  # seconds between two retries while Redis does not answer, which also check whether the worker stops
HAND_BACK_DELAY_S = 1.0  # seconds before a job that needs another worker is handed back, so that it does not circulate
SUSPECT_PRIORITY = 0  # the highest, so that a suspect is not blamed for a crash while it waits for a slot
DEAD_MESSAGE = (
    "the job's worker crashed {} times in a row before the job had a token; see the workers' logs, and retry it with "
    "`cellama dead requeue`"
)
TRIMMED_MESSAGE = (
    "Redis no longer has all tokens of earlier attempts at the job, because the journal exceeded "
    "CELLAMA_JOURNAL_MAX_EVENTS, or was evicted or deleted; send the job again"
)
UNKNOWN_MESSAGE = (
    "job {} is not in the ledger, because it ended long ago, its entry was deleted or evicted, or plain Celery sent it "
    "with cellama's header {}; send it again as a new job without this header"
)
REFUSED_MESSAGE = (
    "Redis refuses a command from the worker ({}); check the permissions of the worker's Redis user, and the Redis "
    "configuration"
)
STOP_MESSAGE = "the worker is stopping"
HANDED_OVER = (Interruption.HANDED_BACK, Interruption.SUPERSEDED)  # after these another attempt ends the job
TIME_LIMITS = (Interruption.SOFT_LIMIT, Interruption.HARD_LIMIT)

CompletionJob = GenerateJob | ChatJob | PrefillJob  # jobs that need a slot of an engine


def attempt_job(runtime: Runtime, task: Task, streams: bool, read_payload: Callable[[], Any]) -> Result:
    """Run one attempt at a task's job, and return the job's result. Raises the exceptions of `JobAttempt.execute`."""
    return JobAttempt(task, runtime, read_payload).execute(streams)


def end_revoked(runtime: Runtime, job_id: str) -> None:
    """End the stream of a job that was revoked before its attempt started in this worker."""
    runtime.ledger.cancel(job_id, running=True)


class JobAttempt:
    """Runs one attempt at a job: reads the payload, calls the job's handler, and ends the job's stream."""

    def __init__(self, task: Task, runtime: Runtime, read_payload: Callable[[], Any]) -> None:
        """Prepare an attempt. `read_payload` returns the payload, or raises InvalidJob."""
        self.job_id: str = task.request.id
        self._task = task
        self._read_payload = read_payload
        self._runtime = runtime
        self._control = current_job()
        self._attempt: Attempt
        self._context: AttemptContext
        self._stream: AttemptStream
        self._engine_ends_stream = False
        self._celery_end = end_with_last_event(task, self._control)
        self._past = Past()
        self._held = contextlib.ExitStack()  # holds the model until the attempt ends

    # The start of the attempt

    def execute(self, streams: bool) -> Result:
        """Return the job's result. Raises JobFailed, or Celery's Ignore, Reject or SoftTimeLimitExceeded."""
        run = new_run()
        with self._passed_quarantine(alone=False) as on_token:
            attempt = self._begin(run, alone=False)
            if attempt.verdict != "suspect":
                return self._run(attempt, streams, on_token)
        with self._passed_quarantine(alone=True) as on_token:
            return self._run(self._begin(run, alone=True), streams, on_token)

    def _passed_quarantine(self, *, alone: bool) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return self._runtime.quarantine.passed(lambda: self._control.interruption is not None, alone=alone)

    def _begin(self, run: str, *, alone: bool) -> Attempt:
        if self._control.interruption is Interruption.HANDED_BACK:
            raise Reject(STOP_MESSAGE, requeue=True)
        ledger, worker = self._runtime.ledger, self._runtime.incarnation
        token = getattr(self._task.request, names.TOKEN_HEADER, "")  # Celery turns message headers into attributes
        started = started_state(self._task)
        return self._retry_redis(
            lambda: ledger.begin(self.job_id, run, worker, token=token, alone=alone, started=started)
        )

    def _run(self, attempt: Attempt, streams: bool, on_token: Callable[[], None]) -> Result:
        self._attempt = attempt
        self._context = context_of(self._task, attempt)
        if attempt.verdict == "superseded":
            self._control.interrupt(Interruption.SUPERSEDED)  # so that its message is not acknowledged
            raise Ignore()
        if attempt.verdict == "gone":
            raise self._end_unknown()
        if attempt.verdict == "done":  # a copied message; another worker or the reaper reports the end to Celery
            raise Ignore()
        if attempt.number > 1:
            self._past = self._retry_redis(lambda: read_past(self._runtime.redis, self.job_id))
            self._past.trimmed |= self._past.next_seq < attempt.next_seq
        around = self._runtime.middlewares.around(self._context, self._control)
        with self._runtime.running(attempt, self._control), self._held, around:
            self._stream = self._runtime.publisher.open(
                attempt,
                self._control,
                streams=streams,
                started=self._past.started,
                on_token=lambda: self._note_token(on_token),
                celery_end=self._celery_end,
                sign=self._context.sign,
            )
            result = self._context.result = self._result_or_end()
            skip_storing(self._task, self._celery_end, self._control)
            return result

    def _note_token(self, leave_quarantine: Callable[[], None]) -> None:
        """End the job's quarantine, because a token from this attempt is in Redis.

        The publisher thread calls this method.
        """
        leave_quarantine()
        if not self._context.has_token:
            self._context.has_token = True
            self._runtime.middlewares.call(Middleware.after_first_token, self._context)

    def _result_or_end(self) -> Result:
        """Call the handler for this kind of job, and return its result.

        Any failure ends the stream and is re-raised.
        """
        try:
            if self._attempt.verdict == "dead":
                raise JobFailed(DEAD, DEAD_MESSAGE.format(self._attempt.num_failures - 1))
            if self._attempt.verdict == "cancelled":
                self._control.interrupt(Interruption.CANCELLED)
            self._raise_if_interrupted()
            if self._past.trimmed:
                raise JobFailed("stream_trimmed", TRIMMED_MESSAGE)
            result = HANDLERS[self._task.name](self, self._read_payload())
        except (Ignore, Reject, SoftTimeLimitExceeded):
            self._end_interrupted()
            raise
        except EngineError as error:
            raise self._end_failed(failure_of(error)) from None
        except (InvalidJob, JobFailed) as error:
            raise self._end_failed(JobFailed(error.code, str(error), error.retryable)) from None
        except Exception as error:
            log.exception("job failed unexpectedly", job_id=self.job_id)
            raise self._end_failed(JobFailed("internal_error", f"{type(error).__name__}: {error}")) from None
        self._ignore_unless_current()
        return result

    # The end of the attempt

    def _end_interrupted(self) -> None:
        """End a job that was cancelled or has reached a time limit.

        Raises Ignore or Reject if another attempt ends the job.
        """
        if self._control.interruption is Interruption.HANDED_BACK:
            self._hand_back()
        if self._control.interruption is Interruption.SUPERSEDED:
            # No end is published: if Redis had lost its last writes, it would still accept the end of this attempt.
            self._stream.hand_back()
            self._stream.ended.result()
            raise Ignore()
        cancelled = self._control.interruption is Interruption.CANCELLED
        self._end_stream(events.done("cancelled" if cancelled else "timeout", self._past.usage))
        self._ignore_unless_current()
        if cancelled and not self._control.is_revoked:  # else the state would return after its job was deleted
            self._task.backend.mark_as_revoked(self.job_id, "cancelled", self._task.request)

    def _end_failed(self, failure: JobFailed) -> JobFailed:
        if not self._engine_ends_stream and not self._control.claim_outcome("failed"):
            self._control.interrupt(Interruption.CANCELLED)
            self._end_interrupted()
            raise Ignore()
        log.info("job failed", job_id=self.job_id, code=failure.code, detail=failure)
        self._end_stream(error_event(failure))
        self._ignore_unless_current()
        return failure

    def _end_stream(self, event: events.Event, result: Result | None = None) -> None:
        """Publish the last event of the job's stream, unless the engine reports the end itself."""
        if not self._engine_ends_stream:
            self._stream.publish(event, result)

    def _ignore_unless_current(self) -> None:
        """Wait until the last event is in Redis. Raises Ignore if another attempt has taken over the job."""
        if not self._stream.ended.result():
            if self._control.interruption is Interruption.HANDED_BACK:  # it was handed back before its end was written
                self._hand_back()
            raise Ignore()

    def _hand_back(self) -> None:
        """Write all tokens to the journal, and raise Reject, which requeues the message."""
        self._stream.hand_back()
        self._stream.ended.result()
        try:
            self._runtime.ledger.hand_back(self._attempt)
        except RedisError as error:
            log.warning(
                "job not returned to its queue",
                job_id=self.job_id,
                detail=f"{error}; a reaper will requeue the job when its lease expires",
            )
        raise Reject(STOP_MESSAGE, requeue=True)

    def _end_unknown(self) -> JobFailed:
        """End a job that is not in the ledger although its message has cellama's header.

        The message may be a copy of an expired job's message, or plain Celery may have sent it. Raises Ignore if Celery
        already has the job's outcome.
        """
        if self._retry_redis(self._task.AsyncResult(self.job_id).ready):
            raise Ignore()
        failure = JobFailed("unknown_job", UNKNOWN_MESSAGE.format(self.job_id, names.SUBMITTED_AT_HEADER))
        self._retry_redis(lambda: self._runtime.ledger.end_unknown(self.job_id, error_event(failure)))
        return failure

    def _raise_if_interrupted(self) -> None:
        """Raise SoftTimeLimitExceeded or Ignore if the job is interrupted.

        Celery itself stores the job's outcome after a revoke or a hard time limit.
        """
        if self._control.interruption is Interruption.SOFT_LIMIT:
            raise SoftTimeLimitExceeded()
        if self._control.interruption is not None:
            raise Ignore()

    def _when_interrupted(self, stop: Callable[[Interruption], None]) -> None:
        """Call `stop` when the job is interrupted. `stop` must cancel this attempt's requests."""

        def interrupted(reason: Interruption) -> None:
            if reason in HANDED_OVER:  # so that the job does not end with the request
                self._stream.hand_back()
            stop(reason)

        self._control.when_interrupted(interrupted)

    def _retry_redis(self, action: Callable[[], T]) -> T:
        """Run an action, and retry the action while Redis does not answer or temporarily refuses commands.

        Raises JobFailed if Redis refuses the command permanently, Reject if the worker stops in the meantime, and
        Ignore or SoftTimeLimitExceeded if the job reaches a time limit.
        """
        with redis_waits.of(f"job {self.job_id}") as waits:
            while True:
                try:
                    return action()
                except RedisError as error:
                    if not is_passing(error):
                        raise JobFailed("redis_refused", REFUSED_MESSAGE.format(error)) from None
                    waits(error)
                if self._control.interruption is Interruption.HANDED_BACK:
                    raise Reject(STOP_MESSAGE, requeue=True)
                if self._control.interruption in TIME_LIMITS:
                    self._raise_if_interrupted()
                time.sleep(RETRY_S)

    # The model and adapters of the first attempt, which later attempts must also have

    def _model(self, job: BaseJob) -> Model:
        """Return the job's model, which stays loaded until the attempt ends.

        Raises UnknownModel, or Ignore if the model is unloading.
        """
        model_id = job.model
        first = self._past.provenance
        if first is not None and model_id == names.DEFAULT_MODEL:  # the default model may have changed
            models = self._runtime.manager.models()
            model_id = next((name for name, model in models.items() if first.is_in(model)), model_id)
        try:
            model = self._held.enter_context(self._runtime.manager.hold(model_id))
            self._runtime.note_job(model.id, job.keep_alive_s)
            return model
        except UnknownModel:
            if not (self._runtime.manager.is_leaving(model_id) or self._runtime.is_on_demand(model_id)):
                raise
        raise self._hand_over()

    def _hand_over(self) -> Ignore:
        """Interrupt this attempt so that another worker, or this worker later on, resumes the job."""
        self._control.interrupt(Interruption.HANDED_BACK)
        return Ignore()

    def _sampling_defaults(self, model: Model) -> Mapping[str, object]:
        """Return the model's sampling defaults as they were at the first attempt."""
        return model.options.sampling_defaults if self._past.provenance is None else self._past.provenance.sampling

    def _provenance(
        self, model: Model, model_id: str, choice: Choice | None, also: Iterable[str] = (), *, is_constrained: bool
    ) -> Provenance:
        """Return the provenance of the job's tokens, which must be the same in all attempts.

        Raises Ignore if another worker can resume the job, and JobFailed if no worker can.
        """
        provenance, version = self._past.provenance, llguidance_version()
        if provenance is None:
            provenance = provenance_of(model, choice, also)
            provenance = replace(provenance, llguidance=version) if is_constrained else provenance
        elif is_constrained and provenance.llguidance is None:  # the first attempt ran in a version without llguidance
            provenance = replace(provenance, llguidance="")
        if provenance.is_in(model) and provenance.llguidance in (None, version):
            self._stream.details = provenance.fields()
            return provenance
        workers = self._retry_redis(lambda: recent_workers(self._runtime.redis))
        if not may_be_served(workers, model_id, provenance):
            any_version = replace(provenance, llguidance=None)
            # This worker may have the model before the registry lists it.
            has_model = any_version.is_in(model) or may_be_served(workers, model_id, any_version)
            raise grammar_changed(provenance, version) if has_model else model_changed(model_id)
        log.info(
            "job handed over to another worker",
            job_id=self.job_id,
            detail="the first attempt used a different model, adapter or llguidance version",
        )
        time.sleep(HAND_BACK_DELAY_S)
        raise self._hand_over()

    def _others_have_adapters(self, model_id: str, adapters: Iterable[str]) -> bool:
        """Return whether another worker has these adapters.

        If another worker does, wait before returning (docs/adr/012-pools.md).
        """
        name = self._runtime.incarnation.split()[0]
        workers = self._retry_redis(lambda: live_workers(self._runtime.redis))
        found = have_adapters([worker for worker in workers if worker.name != name], model_id, adapters)
        time.sleep(HAND_BACK_DELAY_S if found else 0.0)
        return found

    # Jobs that generate or prefill

    def generate(self, job: GenerateJob) -> Result:
        return self._complete(self._model(job), job)

    def chat(self, job: ChatJob) -> Result:
        return with_messages(self._complete(self._model(job), job))

    def prefill(self, job: PrefillJob) -> Result:
        return of_prefill(self._complete(self._model(job), job))

    def _complete(self, model: Model, job: CompletionJob) -> GenerateResult:
        handle = self._submit(model, job)
        self._engine_ends_stream = True
        self._when_interrupted(lambda reason: handle.cancel("timeout" if reason in TIME_LIMITS else "cancelled"))
        # Waiting for the end in Redis first wakes this thread only once, because the engine has finished by then.
        self._stream.ended.exception()
        completion = handle.result()
        self._runtime.prefix_cache.observe(completion)
        log.info(
            "job finished",
            job_id=self.job_id,
            model=model.id,
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.usage.prompt_tokens,
            completion_tokens=completion.usage.completion_tokens,
            duration_ms=round(completion.timings.duration_ms),
        )
        celery_has_result = self._celery_end is not None and self._celery_end.result is not None
        if completion.finish_reason in ("cancelled", "timeout") and not celery_has_result:
            self._raise_if_interrupted()
        return result_of(completion, model.id, self._stream.signer(""), self.job_id)

    def _submit(self, model: Model, job: CompletionJob) -> Handle:
        parameters = {name: getattr(job, name) for name in job.model_fields_set}
        constrained = not isinstance(job, PrefillJob) and is_constrained(parameters, self._sampling_defaults(model))
        provenance = self._provenance(model, job.model, job.adapters, is_constrained=constrained)
        chosen = self._past.provenance is None and job.adapters is not None
        try:
            extras = self._extras(model, job, provenance, job.adapters or () if chosen else provenance.choice)
            self._runtime.middlewares.call(Middleware.before_request, self._context, "", job)
            if isinstance(job, PrefillJob):
                return model.engine.submit(prefill_of(model, job, extras))
            return model.engine.submit(self._request(model, job, provenance, extras))
        except UnknownAdapter:
            if chosen and not self._others_have_adapters(job.model, [name for name, _ in job.adapters or ()]):
                raise
            raise self._hand_over() from None  # also if an adapter of the model was unloaded at this moment

    def _request(
        self, model: Model, job: GenerateJob | ChatJob, provenance: Provenance, extras: RequestExtras
    ) -> Request:
        if not isinstance(job, ChatJob) or not job.cache_prompt:
            return request_of(model, job, extras, self._runtime.signer)
        replay = ChatReplay(self._runtime, model, job, provenance)
        request = replay.request(extras, self._retry_redis)
        self._stream.records_of = replay.records_of
        if replay.fields is not None:
            self._stream.details["replay"] = replay.fields
        return request

    def _extras(self, model: Model, job: CompletionJob, provenance: Provenance, adapters: Choice) -> RequestExtras:
        parent: tuple[int, ...] = ()
        if (key := job.parent_key) is not None:
            parent = self._retry_redis(partial(parent_tokens, self._runtime, model, key, job.cache_scope, adapters))
        return RequestExtras(
            id=self._attempt.run_id,
            submitted_at=self._context.submitted_at,
            adapters=adapters,
            sampling=provenance.sampling,
            mode="stream" if getattr(job, "stream", False) else "generate",
            priority=SUSPECT_PRIORITY if self._attempt.num_failures > 1 else job.priority,
            share=share_of(self._attempt),
            seed=None if isinstance(job, PrefillJob) else self._seed_of(job, provenance.sampling),
            resume=() if isinstance(job, PrefillJob) else resume_of(self._past, job.n),
            parent=parent,
        )

    def _seed_of(self, job: GenerateJob | ChatJob, defaults: Mapping[str, object]) -> int | None:
        """Return the seed of earlier attempts, or a seed derived from the job's id.

        Return None if the job or the model sets a seed. A derived seed is the same in each attempt, even if Redis has
        lost the earlier attempts in a failover.
        """
        if self._past.seed is not None or has_seed(job, defaults):
            return self._past.seed
        return zlib.crc32(self.job_id.encode()) & 0x7FFFFFFF

    # Lines of a bulk run

    def chunk(self, job: ChunkJob) -> Result:
        model = self._model(job)
        constrained = has_constrained_lines(job, self._sampling_defaults(model))
        provenance = self._provenance(model, job.model, None, adapters_of_lines(job), is_constrained=constrained)
        lines = ChunkRun(
            model=model,
            job=job,
            context=self._context,
            stream=self._stream,
            past=self._past,
            runtime=self._runtime,
            provenance=provenance,
            retry_redis=self._retry_redis,
        )
        self._when_interrupted(lambda _: lines.stop())
        self._stream.ended.add_done_callback(lambda _: lines.stop())
        lines.run()
        self._raise_if_interrupted()
        return self._done({"lines": len(job.lines), "usage": usage_of(), "model": model.id})

    # Vectors and scores

    def embed(self, job: EmbedJob) -> Result:
        return self._done(embed(self._model(job), job, self._wait_for))

    def rerank(self, job: RerankJob) -> Result:
        return self._done(rerank(self._model(job), job, self._wait_for))

    def _wait_for(self, handle: EmbeddingHandle, timeout_s: float | None) -> None:
        """Wait until the vectors are computed. Raises Ignore or SoftTimeLimitExceeded if the job is interrupted."""
        self._control.when_interrupted(lambda _: handle.cancel())  # without effect if the vectors are computed already
        try:
            wait_for(handle, timeout_s, self._context.submitted_at)
        except EmbeddingCancelled:
            self._raise_if_interrupted()
            raise

    # Jobs that only need the vocabulary, and no slot

    def tokenize(self, job: TokenizeJob) -> Result:
        model = self._model(job)
        tokens = model.tokenize(job.text, add_special=job.add_special, parse_special=job.parse_special)
        result: TokenizeResult = {"tokens": tokens, "model": model.id}
        if job.return_pieces:
            result["pieces"] = list(map(_piece, model.pieces_of(tokens)))
        return self._done(result)

    def detokenize(self, job: DetokenizeJob) -> Result:
        model = self._model(job)
        return self._done({"text": model.detokenize(job.tokens), "model": model.id})

    def apply_chat_template(self, job: TemplateJob) -> Result:
        model = self._model(job)
        prompt = model.prepare_chat(*conversation_of(job))
        result: TemplateResult = {"prompt": prompt.text, "tokens": prompt.tokens, "model": model.id}
        if job.return_pieces:
            result["pieces"] = list(map(_piece, model.pieces_of(prompt.tokens)))
        return self._done(result)

    def _done(self, result: Result) -> Result:
        """End the stream of a job that ended without an event from an engine, and return the job's result."""
        usage = cast(Usage, result.get("usage") or usage_of())
        self._end_stream(events.done("stop", usage), result)
        log.info("job finished", job_id=self.job_id, model=result["model"], prompt_tokens=usage["prompt_tokens"])
        return result


def _piece(data: bytes) -> Piece:
    """Return the text of a token, or a list of its bytes if the bytes are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


HANDLERS: dict[str, Callable[[JobAttempt, Any], Result]] = {  # by name of the task
    TASK_GENERATE: JobAttempt.generate,
    TASK_CHAT: JobAttempt.chat,
    TASK_PREFILL: JobAttempt.prefill,
    TASK_EMBED: JobAttempt.embed,
    TASK_RERANK: JobAttempt.rerank,
    TASK_CHUNK: JobAttempt.chunk,
    TASK_TOKENIZE: JobAttempt.tokenize,
    TASK_DETOKENIZE: JobAttempt.detokenize,
    TASK_APPLY_CHAT_TEMPLATE: JobAttempt.apply_chat_template,
}

"""One attempt at one job in a worker: whatever happens, its stream ends once and Celery receives the right end.

| what happens                     | stream ends with   | Celery state            |
|----------------------------------|--------------------|-------------------------|
| finished, or `timeout` reached   | done               | SUCCESS                 |
| revoked, or cancelled in Redis   | done, `cancelled`  | REVOKED                 |
| soft or hard time limit          | done, `timeout`    | FAILURE                 |
| wrong payload, engine error, bug | error              | FAILURE with JobFailed  |
| crashed its workers repeatedly   | error, `dead`      | FAILURE with JobFailed  |
| the worker stops before it ends  | (another continues)| none, message is queued |
| the ledger has no entry of it    | error              | FAILURE with JobFailed  |
| another attempt has begun        | (that one's end)   | none: the other sets it |

`JobAttempt.execute` is the whole attempt: quarantine, begin, handler, end. `HANDLERS` has the method for each kind of
job. Everything runs on the job's pool thread, except for the callbacks of interruptions.
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from redis.exceptions import RedisError

from cellama.engine import (
    EmbeddingCancelled,
    EmbeddingHandle,
    EngineError,
    Handle,
    Model,
    UnknownAdapter,
    UnknownModel,
)
from cellama.tasks.broker.celery_ends import end_with_last_event, leave_nothing_to_celery, started_state
from cellama.tasks.broker.pool import Interruption, current_job
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
    TemplateJob,
    TokenizeJob,
)
from cellama.tasks.contract.shapes.results import Usage, usage_of
from cellama.tasks.middleware import AttemptContext, Middleware, context_of
from cellama.tasks.publishing.attempt_stream import AttemptStream
from cellama.tasks.publishing.results import error_event, failure_of, result_of, resume_of
from cellama.tasks.state.history import Past, read_past
from cellama.tasks.state.ledger import new_run
from cellama.tasks.state.provenance import (
    Choice,
    Provenance,
    changed,
    grammar_changed,
    have_adapters,
    may_come,
    provenance_of,
)
from cellama.tasks.state.records import DEAD, Attempt
from cellama.tasks.state.registry import live_workers, llguidance_version, recent_workers
from cellama.tasks.worker.conversation import conversation_of

from .bulk_slice import ChunkRun, adapters_of_lines, has_constrained_lines
from .engine_request import RequestExtras, has_seed, is_constrained, prefill_of, request_of
from .parent import parent_tokens
from .vectors import embed, rerank, wait_for

if TYPE_CHECKING:
    from cellama.tasks.worker.runtime import Runtime

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 0.5  # between two questions of Redis while it does not answer: often enough to notice that the worker ends
ELSEWHERE_S = 1.0  # before a job is handed back that this worker can't continue, so that it does not return at once
MOST_URGENT = 0  # priority of a suspect: it must not be blamed for a crash that happened while it waited for a slot
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
GIVEN_UP = (Interruption.HANDED_BACK, Interruption.SUPERSEDED)  # the attempt's end is not the job's
TIME_LIMITS = (Interruption.SOFT_LIMIT, Interruption.HARD_LIMIT)

Completing = GenerateJob | ChatJob | PrefillJob  # jobs that an engine with slots computes


def attempt_job(runtime: Runtime, task: Task, streams: bool, read_payload: Callable[[], Any]) -> Result:
    """Make one attempt at a task's job and return its result. Raises what Celery expects (see `execute`)."""
    return JobAttempt(task, runtime, read_payload).execute(streams)


def end_revoked(runtime: Runtime, job_id: str) -> None:
    """End the stream of a job that was revoked before anything of it ran here."""
    runtime.ledger.cancel(job_id, running=True)


class JobAttempt:
    """One attempt at a job, from its message to its one end."""

    def __init__(self, task: Task, runtime: Runtime, read_payload: Callable[[], Any]) -> None:
        """`read_payload` returns the payload, or raises InvalidJob."""
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
        self._held = contextlib.ExitStack()  # the model, until the attempt ends

    # The beginning

    def execute(self, streams: bool) -> Result:
        """Return the job's result. Raises what Celery expects: JobFailed, Ignore, Reject, SoftTimeLimitExceeded."""
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
            raise Reject("the worker ends", requeue=True)
        ledger, worker = self._runtime.ledger, self._runtime.incarnation
        token = getattr(self._task.request, names.TOKEN_HEADER, "")  # Celery makes attributes of message headers
        started = started_state(self._task)
        return self._reaching_redis(
            lambda: ledger.begin(self.job_id, run, worker, token=token, alone=alone, started=started)
        )

    def _run(self, attempt: Attempt, streams: bool, on_token: Callable[[], None]) -> Result:
        self._attempt = attempt
        self._context = context_of(self._task, attempt)
        if attempt.verdict == "superseded":  # so its message is not acked
            self._control.interrupt(Interruption.SUPERSEDED)
            raise Ignore()
        if attempt.verdict == "gone":
            raise self._unknown()
        if attempt.verdict == "done":  # a copy; Celery gets the end from the worker that had it, or the reaper
            raise Ignore()
        if attempt.number > 1:
            self._past = self._reaching_redis(lambda: read_past(self._runtime.redis, self.job_id))
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
            leave_nothing_to_celery(self._task, self._celery_end, self._control)
            return result

    def _note_token(self, leave_quarantine: Callable[[], None]) -> None:
        """On the publisher's thread: a token of this attempt is in Redis."""
        leave_quarantine()
        if not self._context.has_token:
            self._context.has_token = True
            self._runtime.middlewares.call(Middleware.after_first_token, self._context)

    def _result_or_end(self) -> Result:
        """Let the handler of the job's kind compute the result. Whatever else happens ends the stream and raises."""
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
            log.exception("job %s failed in an unforeseen way", self.job_id)
            raise self._end_failed(JobFailed("internal_error", f"{type(error).__name__}: {error}")) from None
        self._ignore_unless_mine()
        return result

    # The end

    def _end_interrupted(self) -> None:
        """Cancelled, or over a time limit; or it is not this attempt that ends the job. Raises Ignore, Reject."""
        if self._control.interruption is Interruption.HANDED_BACK:
            self._hand_back()
        if self._control.interruption is Interruption.SUPERSEDED:
            # A Redis that has lost its last writes would still accept this attempt's end.
            self._stream.hand_back()
            self._stream.ended.result()
            raise Ignore()
        cancelled = self._control.interruption is Interruption.CANCELLED
        self._end_stream(events.done("cancelled" if cancelled else "timeout", self._past.usage))
        self._ignore_unless_mine()
        if cancelled:
            self._task.backend.mark_as_revoked(self.job_id, "cancelled", self._task.request)

    def _end_failed(self, failure: JobFailed) -> JobFailed:
        log.info("job %s failed: %s: %s", self.job_id, failure.code, failure)
        self._end_stream(error_event(failure))
        self._ignore_unless_mine()
        return failure

    def _end_stream(self, event: events.Event, result: Result | None = None) -> None:
        """Publish the last event of the job's stream, unless the engine reports it."""
        if not self._engine_ends_stream:
            self._stream.publish(event, result)

    def _ignore_unless_mine(self) -> None:
        """Wait until the terminal event is in Redis. Raises Ignore if another attempt has the job."""
        if not self._stream.ended.result():
            if self._control.interruption is Interruption.HANDED_BACK:  # the end came too late to be written
                self._hand_back()
            raise Ignore()

    def _hand_back(self) -> None:
        """Raise Reject, so that the message is queued again, once everything that was generated is in the journal."""
        self._stream.hand_back()
        self._stream.ended.result()
        try:
            self._runtime.ledger.hand_back(self._attempt)
        except RedisError as error:
            log.warning("job %s is not handed back: %s; it is recovered when its lease ends", self.job_id, error)
        raise Reject("the worker ends", requeue=True)

    def _unknown(self) -> JobFailed:
        """End a message that claims to be in the ledger and is not: the copy of a job that is forgotten, or a message
        of plain Celery under a header of ours. Raises Ignore if Celery knows an end."""
        if self._reaching_redis(self._task.AsyncResult(self.job_id).ready):
            raise Ignore()
        failure = JobFailed("unknown_job", UNKNOWN_MESSAGE.format(self.job_id, names.SUBMITTED_AT_HEADER))
        self._reaching_redis(lambda: self._runtime.ledger.end_unknown(self.job_id, error_event(failure)))
        return failure

    def _raise_if_interrupted(self) -> None:
        """Raise what Celery expects of a job that it ended itself; it has stored revokes and hard limits already."""
        if self._control.interruption is Interruption.SOFT_LIMIT:
            raise SoftTimeLimitExceeded()
        if self._control.interruption is not None:
            raise Ignore()

    def _when_interrupted(self, stop: Callable[[Interruption], None]) -> None:
        """Let `stop` end the requests of this attempt when the job is interrupted."""

        def interrupted(reason: Interruption) -> None:
            if reason in GIVEN_UP:  # no end that the engine reports is the job's
                self._stream.hand_back()
            stop(reason)

        self._control.when_interrupted(interrupted)

    def _reaching_redis(self, action: Callable[[], T]) -> T:
        """Wait while Redis does not answer, or refuses commands for now.

        The end of the worker hands the job back meanwhile, and time limits end it.

        Raises JobFailed if Redis refuses the command for good, because asking again would not help.
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
                if self._control.interruption is Interruption.HANDED_BACK:
                    raise Reject("the worker ends", requeue=True)
                if self._control.interruption in TIME_LIMITS:
                    self._raise_if_interrupted()
                time.sleep(RETRY_S)

    # What a job continues with: the same model and adapters as its first attempt, or not here

    def _model(self, model_id: str) -> Model:
        """Hold the job's model until the attempt ends. Raises UnknownModel, or Ignore if it is being unloaded."""
        begun = self._past.provenance
        if begun is not None and model_id == names.DEFAULT_MODEL:  # it may be another one by now
            models = self._runtime.manager.models()
            model_id = next((name for name, model in models.items() if begun.is_in(model)), model_id)
        try:
            return self._held.enter_context(self._runtime.manager.hold(model_id))
        except UnknownModel:
            if not self._runtime.manager.is_leaving(model_id):
                raise
        raise self._left_to_others()

    def _left_to_others(self) -> Ignore:
        """Interrupt this attempt, so that another worker continues the job, or this one does later."""
        self._control.interrupt(Interruption.HANDED_BACK)
        return Ignore()

    def _sampling_defaults(self, model: Model) -> Mapping[str, object]:
        """Those of the model, as the first attempt had them."""
        return model.options.sampling_defaults if self._past.provenance is None else self._past.provenance.sampling

    def _provenance(
        self, model: Model, model_id: str, choice: Choice | None, also: Iterable[str] = (), *, is_constrained: bool
    ) -> Provenance:
        """What this attempt rests on: the same as the first one, or nothing at all. Raises Ignore, JobFailed."""
        begun, here = self._past.provenance, llguidance_version()
        if begun is None:
            begun = provenance_of(model, choice, also)
            begun = replace(begun, llguidance=here) if is_constrained else begun
        elif is_constrained and begun.llguidance is None:  # it began in a version that had other code for that
            begun = replace(begun, llguidance="")
        if begun.is_in(model) and begun.llguidance in (None, here):
            self._stream.details = begun.fields()
            return begun
        workers = self._reaching_redis(lambda: recent_workers(self._runtime.redis))
        if not may_come(workers, model_id, begun):
            has_model = may_come(workers, model_id, replace(begun, llguidance=None))
            raise grammar_changed(begun, here) if has_model else changed(model_id)
        log.info(
            "job %s waits for a worker with the model, the adapters and the version of llguidance that it began with",
            self.job_id,
        )
        time.sleep(ELSEWHERE_S)
        raise self._left_to_others()

    def _have_others_adapters(self, model_id: str, adapters: Iterable[str]) -> bool:
        """Whether another worker has the adapters that this one lacks; waits first if so (docs/adr/012-pools.md)."""
        own = self._runtime.incarnation.split()[0]
        workers = self._reaching_redis(lambda: live_workers(self._runtime.redis))
        found = have_adapters([worker for worker in workers if worker.name != own], model_id, adapters)
        time.sleep(ELSEWHERE_S if found else 0.0)
        return found

    # Jobs that generate, or read a prompt

    def generate(self, job: GenerateJob) -> Result:
        return self._complete(self._model(job.model), job)

    def chat(self, job: ChatJob) -> Result:
        return with_messages(self._complete(self._model(job.model), job))

    def prefill(self, job: PrefillJob) -> Result:
        return of_prefill(self._complete(self._model(job.model), job))

    def _complete(self, model: Model, job: Completing) -> GenerateResult:
        handle = self._submit(model, job)
        self._engine_ends_stream = True
        self._when_interrupted(lambda reason: handle.cancel("timeout" if reason in TIME_LIMITS else "cancelled"))
        # The end in Redis first: the engine has reported its own by then, so this thread wakes up once.
        self._stream.ended.exception()
        completion = handle.result()
        log.info(
            "job %s on %s: %s, %d + %d tokens in %.0f ms",
            self.job_id,
            model.id,
            completion.finish_reason,
            completion.usage.prompt_tokens,
            completion.usage.completion_tokens,
            completion.timings.duration_ms,
        )
        celery_has_result = self._celery_end is not None and self._celery_end.result is not None
        if completion.finish_reason in ("cancelled", "timeout") and not celery_has_result:
            self._raise_if_interrupted()
        return result_of(completion, model.id, self._stream.signer(""))

    def _submit(self, model: Model, job: Completing) -> Handle:
        given = {name: getattr(job, name) for name in job.model_fields_set}
        constrained = not isinstance(job, PrefillJob) and is_constrained(given, self._sampling_defaults(model))
        rests_on = self._provenance(model, job.model, job.adapters, is_constrained=constrained)
        chosen = self._past.provenance is None and job.adapters is not None
        try:
            extras = self._extras(model, job, rests_on, job.adapters or () if chosen else rests_on.choice)
            self._runtime.middlewares.call(Middleware.before_request, self._context, "", job)
            if isinstance(job, PrefillJob):
                return model.engine.submit(prefill_of(model, job, extras))
            return model.engine.submit(request_of(model, job, extras, self._runtime.signer))
        except UnknownAdapter:
            if chosen and not self._have_others_adapters(job.model, [name for name, _ in job.adapters or ()]):
                raise
            raise self._left_to_others() from None  # or one of the model's own adapters was removed just now

    def _extras(self, model: Model, job: Completing, rests_on: Provenance, adapters: Choice) -> RequestExtras:
        """What the request has in addition to the job's own parameters."""
        extras = RequestExtras(
            id=self._attempt.run_id,
            submitted_at=self._context.submitted_at,
            adapters=adapters,
            sampling=rests_on.sampling,
            mode="stream" if getattr(job, "stream", False) else "generate",
            priority=MOST_URGENT if self._attempt.num_failures > 1 else job.priority,
        )
        if (key := job.parent_key) is not None:
            of_key = partial(parent_tokens, self._runtime, model, key, job.cache_scope, adapters)
            extras = replace(extras, parent=self._reaching_redis(of_key))
        if isinstance(job, PrefillJob):
            return extras
        return replace(extras, seed=self._seed_of(job, rests_on.sampling), resume=resume_of(self._past, job.n))

    def _seed_of(self, job: GenerateJob | ChatJob, defaults: Mapping[str, object]) -> int | None:
        """That of earlier attempts; None for the job's own, or the model's; else one that each attempt would choose,
        even if Redis has forgotten the others in a failover."""
        if self._past.seed is not None or has_seed(job, defaults):
            return self._past.seed
        return zlib.crc32(self.job_id.encode()) & 0x7FFFFFFF

    # Lines of a bulk run

    def chunk(self, job: ChunkJob) -> Result:
        model = self._model(job.model)
        constrained = has_constrained_lines(job, self._sampling_defaults(model))
        rests_on = self._provenance(model, job.model, None, adapters_of_lines(job), is_constrained=constrained)
        lines = ChunkRun(
            model=model,
            job=job,
            context=self._context,
            stream=self._stream,
            past=self._past,
            runtime=self._runtime,
            rests_on=rests_on,
            reaching_redis=self._reaching_redis,
        )
        self._when_interrupted(lambda _: lines.stop())
        self._stream.ended.add_done_callback(lambda _: lines.stop())
        lines.run()
        self._raise_if_interrupted()
        return self._done({"lines": len(job.lines), "usage": usage_of(), "model": model.id})

    # Vectors and scores

    def embed(self, job: EmbedJob) -> Result:
        return self._done(embed(self._model(job.model), job, self._wait_for))

    def rerank(self, job: RerankJob) -> Result:
        return self._done(rerank(self._model(job.model), job, self._wait_for))

    def _wait_for(self, handle: EmbeddingHandle, timeout_s: float | None) -> None:
        """Until the vectors are there. Raises what the attempt ends with otherwise."""
        self._control.when_interrupted(lambda _: handle.cancel())  # what is computed already may still be the end
        try:
            wait_for(handle, timeout_s, self._context.submitted_at)
        except EmbeddingCancelled:
            self._raise_if_interrupted()
            raise

    # Jobs that need the vocabulary only, and no engine: they wait for no slot

    def tokenize(self, job: TokenizeJob) -> Result:
        model = self._model(job.model)
        tokens = model.tokenize(job.text, add_special=job.add_special, parse_special=job.parse_special)
        return self._done({"tokens": tokens, "model": model.id})

    def detokenize(self, job: DetokenizeJob) -> Result:
        model = self._model(job.model)
        return self._done({"text": model.detokenize(job.tokens), "model": model.id})

    def apply_chat_template(self, job: TemplateJob) -> Result:
        model = self._model(job.model)
        prompt = model.prepare_chat(*conversation_of(job))
        return self._done({"prompt": prompt.text, "tokens": prompt.tokens, "model": model.id})

    def _done(self, result: Result) -> Result:
        """End the stream of a job whose end no engine reports."""
        usage = cast(Usage, result.get("usage") or usage_of())
        self._end_stream(events.done("stop", usage), result)
        log.info("job %s on %s: done, %d tokens", self.job_id, result["model"], usage["prompt_tokens"])
        return result


HANDLERS: dict[str, Callable[[JobAttempt, Any], Result]] = {  # by task: what an attempt does with the payload
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

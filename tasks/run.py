"""One run of one job in a worker: whatever happens, its stream ends once and Celery hears the right thing.

| what happens                     | stream ends with   | Celery state           |
|----------------------------------|--------------------|------------------------|
| finished, or `timeout` reached   | done               | SUCCESS                |
| revoked with terminate           | done, `cancelled`  | REVOKED (Celery's own) |
| soft or hard time limit          | done, `timeout`    | FAILURE                |
| wrong payload, engine error, bug | error              | FAILURE with JobFailed |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.exceptions import Ignore, SoftTimeLimitExceeded

from cellama.engine import (
    Completion,
    EmbeddingCancelled,
    EmbeddingHandle,
    EngineError,
    Handle,
    Model,
    Request,
    SamplingParams,
)

from .contract import events
from .contract.errors import InvalidJob, JobFailed
from .contract.names import SUBMITTED_AT_HEADER
from .contract.payloads import ChatJob, EmbedJob, GenerateJob
from .pool import Interruption, current_job
from .results import NO_USAGE, error_event, failure_of, result_of

if TYPE_CHECKING:
    from .runtime import Runtime

log = logging.getLogger(__name__)

Result = dict[str, Any]
SAMPLING = tuple(SamplingParams.__dataclass_fields__)


class JobRun:
    """A job on its way through the engine. Pool thread only."""

    def __init__(self, task: Task, runtime: Runtime) -> None:
        self._job_id: str = task.request.id
        self._runtime = runtime
        self._control = current_job()
        self._engine_ends_stream = False
        sent = getattr(task.request, SUBMITTED_AT_HEADER, None)  # Celery makes attributes of message headers
        waited_s = max(0.0, time.time() - sent) if isinstance(sent, int | float) else 0.0
        self._submitted_at = time.monotonic() - waited_s

    def execute(self, body: Callable[[JobRun], Result]) -> Result:
        """The result of `body`. Raises what Celery expects: JobFailed, Ignore, SoftTimeLimitExceeded."""
        try:
            if self._control.interruption is Interruption.CANCELLED:
                raise Ignore()
            return body(self)
        except (Ignore, SoftTimeLimitExceeded):
            cancelled = self._control.interruption is Interruption.CANCELLED
            self._end_stream(events.done("cancelled" if cancelled else "timeout", NO_USAGE))
            raise
        except EngineError as error:
            raise self._fail(failure_of(error)) from None
        except (InvalidJob, JobFailed) as error:
            raise self._fail(JobFailed(error.code, str(error), error.retryable)) from None
        except Exception as error:
            log.exception("job %s failed in a way that nobody foresaw", self._job_id)
            raise self._fail(JobFailed("internal_error", f"{type(error).__name__}: {error}")) from None

    def _fail(self, failure: JobFailed) -> JobFailed:
        self._end_stream(error_event(failure))
        return failure

    def _end_stream(self, event: events.Event) -> None:
        if not self._engine_ends_stream:
            self._runtime.publisher.publish(self._job_id, event)

    def generate(self, job: GenerateJob) -> Result:
        model = self._model(job.model)
        model.require("generate")
        tokens = model.tokenize(job.prompt) if isinstance(job.prompt, str) else job.prompt
        return result_of(self._complete(model, job, tokens), model.id)

    def chat(self, job: ChatJob) -> Result:
        model = self._model(job.model)
        model.require("chat")
        tokens = model.tokenize_chat([m.model_dump() for m in job.messages], **job.template_args)
        result = result_of(self._complete(model, job, tokens), model.id)
        for choice in [result, *result.get("choices", [])]:
            choice["message"] = {"role": "assistant", "content": choice["text"]}
        return result

    def embed(self, job: EmbedJob) -> Result:
        model = self._model(job.model)
        model.require("embed")
        tokens = [model.tokenize(text) for text in job.texts]
        vectors = self._wait_for_vectors(model.embedder.submit(tokens), job.timeout)
        usage = {**NO_USAGE, "prompt_tokens": sum(map(len, tokens))}
        self._end_stream(events.done("stop", usage))
        return {"embeddings": vectors, "usage": usage, "model": model.id}

    def _model(self, model_id: str) -> Model:
        return self._runtime.manager.get(model_id)

    def _complete(self, model: Model, job: GenerateJob | ChatJob, tokens: list[int]) -> Completion:
        handle = model.engine.submit(self._request(job, tokens))
        self._engine_ends_stream = True
        self._control.when_interrupted(lambda reason: _stop(handle, reason))
        completion = handle.result()
        log.info(
            "job %s on %s: %s, %d + %d tokens in %.0f ms",
            *(self._job_id, model.id, completion.finish_reason),
            *(completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.timings.duration_ms),
        )
        if completion.finish_reason in ("cancelled", "timeout"):
            self._raise_if_interrupted()
        return completion

    def _request(self, job: GenerateJob | ChatJob, tokens: list[int]) -> Request:
        return Request(
            id=self._job_id,
            prompt=tuple(tokens),
            sampling=SamplingParams(**{name: getattr(job, name) for name in SAMPLING}),
            max_tokens=job.max_tokens,
            n=job.n,
            cache_prompt=job.cache_prompt,
            cache_scope=job.cache_scope,
            stop=job.stop,
            ignore_eos=job.ignore_eos,
            timeout_s=job.timeout,
            priority=job.priority,
            stream=job.stream,
            submitted_at=self._submitted_at,
        )

    def _wait_for_vectors(self, handle: EmbeddingHandle, timeout_s: float | None) -> list[list[float]]:
        self._control.when_interrupted(lambda _: handle.cancel())
        remaining_s = None if timeout_s is None else max(0.0, self._submitted_at + timeout_s - time.monotonic())
        try:
            return handle.result(remaining_s)
        except TimeoutError:
            handle.cancel()
            message = f"the texts were not embedded within the timeout of {timeout_s} s; raise it, or send fewer texts"
            raise JobFailed("timeout", message, retryable=True) from None
        except EmbeddingCancelled:
            self._raise_if_interrupted()
            raise

    def _raise_if_interrupted(self) -> None:
        """Raises what Celery expects of a job that it ended itself; it has stored revokes and hard limits already."""
        if self._control.interruption is Interruption.SOFT_LIMIT:
            raise SoftTimeLimitExceeded()
        if self._control.interruption is not None:
            raise Ignore()


def _stop(handle: Handle, reason: Interruption) -> None:
    handle.cancel("cancelled" if reason is Interruption.CANCELLED else "timeout")

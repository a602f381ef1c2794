"""What each kind of job does in an attempt at it."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from celery import Task
from celery.exceptions import Ignore

from cellama.engine import (
    Completion,
    EmbeddingCancelled,
    EmbeddingHandle,
    Handle,
    Model,
    Request,
    UnknownAdapter,
)
from cellama.tasks.broker.pool import Interruption
from cellama.tasks.contract import events
from cellama.tasks.contract.chunks import ChunkJob
from cellama.tasks.contract.payloads import (
    ApplyChatTemplateJob,
    ChatJob,
    DetokenizeJob,
    EmbedJob,
    GenerateJob,
    PrefillJob,
    RerankJob,
    TokenizeJob,
)
from cellama.tasks.contract.shapes.results import (
    ChunkResult,
    EmbedResult,
    RerankResult,
    Result,
    of_prefill,
    usage_of,
    with_messages,
)
from cellama.tasks.publishing.results import result_of, resume_of
from cellama.tasks.state.foundation import Choice, Foundation, have_adapters
from cellama.tasks.state.registry import live_workers

from .attempt import ELSEWHERE_S, GIVEN_UP, JobAttempt
from .bulk_slice import ChunkRun, adapters_of_lines, has_constrained_lines
from .engine_request import Asked, conversation_of, has_seed, is_constrained, prefill_of, request_of, signer_of
from .parent import context_of
from .vectors import embed, rerank, wait_for

if TYPE_CHECKING:
    from cellama.tasks.worker.runtime import Runtime

log = logging.getLogger(__name__)

Reading = GenerateJob | ChatJob | PrefillJob
MOST_URGENT = 0  # a suspect gets a slot at once: it shall not be blamed for a death while it only waited


class JobRun(JobAttempt):
    """A job on its way through the engine. Pool thread only."""

    def generate(self, job: GenerateJob) -> Result:
        model = self.model(job.model)
        return result_of(self._complete(model, job), model.id, self.runtime.signer)

    def chat(self, job: ChatJob) -> Result:
        model = self.model(job.model)
        signer = signer_of(job, self.runtime.signer)
        if signer.has_key:
            self.runtime.publisher.sign_with(self.attempt.run_id, signer)
        return with_messages(result_of(self._complete(model, job), model.id, signer))

    def prefill(self, job: PrefillJob) -> Result:
        model = self.model(job.model)
        return of_prefill(result_of(self._complete(model, job), model.id, self.runtime.signer))

    def embed(self, job: EmbedJob) -> Result:
        return self._end_with(embed(self.model(job.model), job, self._wait_for))

    def rerank(self, job: RerankJob) -> Result:
        return self._end_with(rerank(self.model(job.model), job, self._wait_for))

    def chunk(self, job: ChunkJob) -> Result:
        model = self.model(job.model)
        constrained = has_constrained_lines(job, self.sampling_defaults(model))
        rests_on = self.foundation(model, job.model, None, adapters_of_lines(job), is_constrained=constrained)
        lines = ChunkRun(model, job, self.attempt.run_id, self.past, self.runtime, rests_on, self.reaching_redis)
        self.runtime.watchers.lines_from(self.attempt.run_id, lines.began_at)
        self.control.when_interrupted(lambda reason: self._stop_lines(lines, reason))
        self.ended.add_done_callback(lambda _: lines.stop())
        lines.run()
        self.raise_if_interrupted()
        return self._end_with({"lines": len(job.lines), "usage": usage_of(), "model": model.id})

    def _stop_lines(self, lines: ChunkRun, reason: Interruption) -> None:
        if reason in GIVEN_UP:
            self.runtime.publisher.hand_back(self.attempt.run_id)
        lines.stop()

    def _end_with(self, result: EmbedResult | RerankResult | ChunkResult) -> Result:
        self.end_stream(events.done("stop", result["usage"]), result)
        log.info("job %s on %s: read, %d tokens", self.job_id, result["model"], result["usage"]["prompt_tokens"])
        return result

    # What follows needs the vocabulary only, and no engine: it waits for no slot.

    def tokenize(self, job: TokenizeJob) -> Result:
        model = self.model(job.model)
        tokens = model.tokenize(job.text, add_special=job.add_special, parse_special=job.parse_special)
        return self._end_light({"tokens": tokens, "model": model.id})

    def detokenize(self, job: DetokenizeJob) -> Result:
        model = self.model(job.model)
        return self._end_light({"text": model.detokenize(job.tokens), "model": model.id})

    def apply_chat_template(self, job: ApplyChatTemplateJob) -> Result:
        model = self.model(job.model)
        prompt = model.prepare_chat(*conversation_of(job))
        return self._end_light({"prompt": prompt.text, "tokens": prompt.tokens, "model": model.id})

    def _end_light(self, result: Result) -> Result:
        self.end_stream(events.done("stop", usage_of()), result)
        return result

    def _complete(self, model: Model, job: Reading) -> Completion:
        given = {name: getattr(job, name) for name in job.model_fields_set}
        constrained = not isinstance(job, PrefillJob) and is_constrained(given, self.sampling_defaults(model))
        rests_on = self.foundation(model, job.model, job.adapters, is_constrained=constrained)
        chosen = self.past.foundation is None and job.adapters is not None
        try:
            asked = self._asked(model, job, rests_on, job.adapters or () if chosen else rests_on.choice)
            handle = model.engine.submit(self._request(model, job, asked))
        except UnknownAdapter:
            if chosen and not self._adapters_are_elsewhere(job.model, [name for name, _ in job.adapters or ()]):
                raise
            self.control.interrupt(Interruption.HANDED_BACK)  # or one of the model's own went just now
            raise Ignore() from None
        self.engine_ends_stream = True
        self.control.when_interrupted(lambda reason: self._stop(handle, reason))
        self.ended.exception()  # first: when its end is in Redis the engine has told it, and no thread wakes up twice
        completion = handle.result()
        log.info(
            "job %s on %s: %s, %d + %d tokens in %.0f ms",
            *(self.job_id, model.id, completion.finish_reason),
            *(completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.timings.duration_ms),
        )
        if completion.finish_reason in ("cancelled", "timeout") and not self.celery_has_result:
            self.raise_if_interrupted()
        return completion

    def _asked(self, model: Model, job: Reading, rests_on: Foundation, adapters: Choice) -> Asked:
        """What the request has beside the job's own parameters."""
        asked = Asked(
            id=self.attempt.run_id,
            submitted_at=self.submitted_at,
            adapters=adapters,
            sampling=rests_on.sampling,
            mode="stream" if getattr(job, "stream", False) else "generate",
            priority=MOST_URGENT if self.attempt.num_failures > 1 else job.priority,
        )
        if (key := job.parent_key) is not None:
            of_key = partial(context_of, self.runtime, model, key, job.cache_scope, adapters)
            asked = replace(asked, parent=self.reaching_redis(of_key))
        if isinstance(job, PrefillJob):
            return asked
        return replace(asked, seed=self._seed_of(job, rests_on.sampling), resume=resume_of(self.past, job.n))

    def _request(self, model: Model, job: Reading, asked: Asked) -> Request:
        if isinstance(job, PrefillJob):
            return prefill_of(model, job, asked)
        return request_of(model, job, asked, self.runtime.signer)

    def _adapters_are_elsewhere(self, asked: str, names: Iterable[str]) -> bool:
        """True, after a while, if another worker has what this one lacks (docs/adr/012-pools.md)."""
        own = self.runtime.incarnation.split()[0]
        workers = self.reaching_redis(lambda: live_workers(self.runtime.redis))
        found = have_adapters([worker for worker in workers if worker.name != own], asked, names)
        time.sleep(ELSEWHERE_S if found else 0.0)
        return found

    def _seed_of(self, job: GenerateJob | ChatJob, defaults: Mapping[str, object]) -> int | None:
        """That of earlier attempts; None for the job's own, or the model's; else one that each attempt would choose,
        even if Redis has forgotten the others in a failover."""
        if self.past.seed is not None or has_seed(job, defaults):
            return self.past.seed
        return zlib.crc32(self.job_id.encode()) & 0x7FFFFFFF

    def _stop(self, handle: Handle, reason: Interruption) -> None:
        if reason in GIVEN_UP:  # this end is not told
            self.runtime.publisher.hand_back(self.attempt.run_id)
        handle.cancel("timeout" if reason in (Interruption.SOFT_LIMIT, Interruption.HARD_LIMIT) else "cancelled")

    def _wait_for(self, handle: EmbeddingHandle, timeout_s: float | None) -> None:
        """Until the vectors are there. Raises what the run ends with otherwise."""
        self.control.when_interrupted(lambda _: handle.cancel())
        try:
            wait_for(handle, timeout_s, self.submitted_at)
        except EmbeddingCancelled:
            self.raise_if_interrupted()
            raise


def attempt_job(runtime: Runtime, task: Task, streams: bool, body: Callable[[JobRun], Result]) -> Result:
    """Makes one attempt at a task's job; `body` does the work. Raises what Celery expects."""
    return JobRun(task, runtime).execute(streams, body)

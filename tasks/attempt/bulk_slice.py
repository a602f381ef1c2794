"""Process a slice of a bulk run.

The slice is a single job, and each line is a request to the engine or the embedder.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded, TaskPredicate

from cellama.config.logging import event_logger
from cellama.engine import EmbeddingCancelled, EmbeddingHandle, EngineError, Handle, Model
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.contract.kinds.chunk import ChunkJob, job_of_line
from cellama.tasks.contract.kinds.embed import EmbedJob
from cellama.tasks.contract.kinds.rerank import RerankJob
from cellama.tasks.middleware import AttemptContext, Middleware
from cellama.tasks.publishing.publisher import LINE_MARK, AttemptStream
from cellama.tasks.publishing.results import error_of, failure_of, resume_of
from cellama.tasks.state.history import Past, Provenance

from .engine_request import RequestExtras, has_seed, is_constrained, parent_tokens, request_of, share_of
from .vectors import ranking_of, submit_documents, submit_texts, vectors_of, wait_for

if TYPE_CHECKING:
    from cellama.tasks.worker.runtime import Runtime

log = event_logger(__name__)

TextLine = tuple[int, EmbedJob | RerankJob, EmbeddingHandle]  # with its index
Parent = tuple[int, ...]  # tokens of the context that a line continues


def adapters_of_lines(job: ChunkJob) -> set[str]:
    """Return the names of the adapters that the job's lines choose."""
    names: set[str] = set()
    for line in job.lines:
        if line.params.get("adapters") is not None:
            with contextlib.suppress(InvalidJob):  # which the line reports later
                parsed = job_of_line(line, job.model, job.priority)
                names |= {name for name, _ in getattr(parsed, "adapters", None) or ()}
    return names


def has_constrained_lines(job: ChunkJob, defaults: Mapping[str, object]) -> bool:
    """Return whether a constraint applies to the output of any line."""
    return any(line.kind in ("generate", "chat") and is_constrained(line.params, defaults) for line in job.lines)


class ChunkRun:
    """One attempt at a slice. The attempt runs on the job's thread, except for `stop` and `_finish_line`."""

    def __init__(
        self,
        model: Model,
        job: ChunkJob,
        context: AttemptContext,
        stream: AttemptStream,
        past: Past,
        runtime: Runtime,
        provenance: Provenance,
        retry_redis: Callable[[Callable[[], Parent]], Parent],
    ) -> None:
        """Prepare the lines that earlier attempts have not finished.

        `provenance` applies to lines that choose no adapters. `retry_redis` retries an action until Redis answers.
        """
        self._retry_redis = retry_redis
        self._model = model
        self._job = job
        self._context = context
        self._stream = stream
        self._run_id = stream.attempt.run_id
        self._share = share_of(stream.attempt)
        self._past = past
        self._provenance = provenance
        self._runtime = runtime
        self._unfinished = set(range(len(job.lines))) - past.lines
        self._handles: list[Handle | EmbeddingHandle] = []
        self._stopped = False
        self._started_at = time.monotonic()
        self._changed = threading.Condition()

    def run(self) -> None:
        """Process the lines. Return once the outcome of every line is in Redis, or once `stop` has been called."""
        self._context.requests_from = self._started_at  # all lines count as submitted now
        self._stream.on_line = self._finish_line
        self._stream.publish(events.started(self._model.id, 0, self._runtime.incarnation.split()[0], 0))
        texts: list[TextLine] = []
        for index in sorted(self._unfinished):
            if self._stopped:
                break
            self._try(index, partial(self._start_line, index, texts))
        for index, job, handle in texts:
            self._try(index, partial(self._finish_texts, index, job, handle))
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._unfinished)

    def stop(self) -> None:
        """Cancel the running lines, and stop publishing their events. Thread-safe."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            handles = list(self._handles)
        for handle in handles:
            handle.cancel()

    def _finish_line(self, index: int) -> None:
        with self._changed:
            self._unfinished.discard(index)
            if not self._unfinished:
                self._changed.notify_all()

    def _try(self, index: int, step: Callable[[], None]) -> None:
        """Call `step`, which handles a part of a line. If `step` raises an error, only this line fails."""
        try:
            step()
        except EmbeddingCancelled:
            pass  # by `stop`
        except (TaskPredicate, SoftTimeLimitExceeded):
            raise  # these end the attempt at the whole slice
        except (InvalidJob, JobFailed) as error:
            self._publish_failure(index, error)
        except EngineError as error:
            self._publish_failure(index, failure_of(error))
        except Exception as error:
            log.exception("line of bulk run failed unexpectedly", run=self._run_id, line=index)
            self._publish_failure(index, JobFailed("internal_error", f"{type(error).__name__}: {error}"))

    def _start_line(self, index: int, texts: list[TextLine]) -> None:
        job = job_of_line(self._job.lines[index], self._model.id, self._job.priority)
        if isinstance(job, EmbedJob | RerankJob):
            vectors = (
                submit_texts(self._model, job) if isinstance(job, EmbedJob) else submit_documents(self._model, job)
            )
            texts.append((index, job, vectors))
            self._add_handle(vectors)
            return
        adapters, key = self._provenance.choice if job.adapters is None else job.adapters, job.parent_key
        find_parent = partial(parent_tokens, self._runtime, self._model, str(key), job.cache_scope, adapters)
        extras = RequestExtras(
            id=f"{self._run_id}{LINE_MARK}{index}",
            submitted_at=self._started_at,
            adapters=adapters,
            sampling=self._provenance.sampling,
            seed=None if has_seed(job, self._provenance.sampling) else self._seed_of(index),
            mode="generate",
            priority=job.priority,
            share=self._share,
            resume=resume_of(self._past, job.n, index),
            parent=() if key is None else self._retry_redis(find_parent),
        )
        self._runtime.middlewares.call(Middleware.before_request, self._context, str(index), job)
        self._add_handle(self._model.engine.submit(request_of(self._model, job, extras, self._runtime.signer)))

    def _add_handle(self, handle: Handle | EmbeddingHandle) -> None:
        with self._changed:
            self._handles.append(handle)
            stopped = self._stopped
        if stopped:
            handle.cancel()

    def _seed_of(self, index: int) -> int:
        """Return a line's seed, which is the same in every attempt, so that a later attempt can resume the line."""
        return zlib.crc32(f"{self._run_id.partition('#')[0]} {index}".encode()) & 0x7FFFFFFF

    def _finish_texts(self, index: int, job: EmbedJob | RerankJob, handle: EmbeddingHandle) -> None:
        wait_for(handle, job.timeout, self._started_at)
        result: Any = (
            vectors_of(self._model, job, handle) if isinstance(job, EmbedJob) else ranking_of(self._model, job, handle)
        )
        self._stream.publish(events.line(index, {"result": result}))

    def _publish_failure(self, index: int, failure: InvalidJob | JobFailed) -> None:
        self._stream.publish(events.line(index, {"error": error_of(failure)}))

"""The lines of a slice of a bulk run in the engine. Each line is a request; the slice is the job with the journal."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from celery.exceptions import SoftTimeLimitExceeded, TaskPredicate

from cellama.engine import EmbeddingCancelled, EmbeddingHandle, EngineError, Handle, Model
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import InvalidJob, JobFailed
from cellama.tasks.contract.kinds.chunk import ChunkJob, job_of_line
from cellama.tasks.contract.kinds.embed import EmbedJob
from cellama.tasks.middleware import AttemptContext, Middleware
from cellama.tasks.publishing.attempt_stream import AttemptStream
from cellama.tasks.publishing.publisher import LINE_MARK
from cellama.tasks.publishing.results import error_of, failure_of, resume_of
from cellama.tasks.state.history import Past
from cellama.tasks.state.provenance import Provenance

from .engine_request import RequestExtras, has_seed, is_constrained, request_of
from .parent import parent_tokens
from .vectors import submit_texts, vectors_of, wait_for

if TYPE_CHECKING:
    from cellama.tasks.worker.runtime import Runtime

log = logging.getLogger(__name__)

Parent = tuple[int, ...]  # the context that a line follows


def adapters_of_lines(job: ChunkJob) -> set[str]:
    """Return the names of the adapters that lines choose."""
    names: set[str] = set()
    for line in job.lines:
        if line.params.get("adapters") is not None:
            with contextlib.suppress(InvalidJob):  # the line fails with it later
                parsed = job_of_line(line, job.model, job.priority)
                names |= {name for name, _ in getattr(parsed, "adapters", None) or ()}
    return names


def has_constrained_lines(job: ChunkJob, defaults: Mapping[str, object]) -> bool:
    """Return whether the text of a line is constrained."""
    return any(line.kind != "embed" and is_constrained(line.params, defaults) for line in job.lines)


class ChunkRun:
    """One attempt at a slice. Its thread is that of the job, except for `stop` and `_note_line`."""

    def __init__(
        self,
        model: Model,
        job: ChunkJob,
        context: AttemptContext,
        stream: AttemptStream,
        past: Past,
        runtime: Runtime,
        rests_on: Provenance,
        reaching_redis: Callable[[Callable[[], Parent]], Parent],
    ) -> None:
        """`rests_on` holds for lines that choose no adapters. `reaching_redis` waits until Redis answers."""
        self._reaching_redis = reaching_redis
        self._model = model
        self._job = job
        self._context = context
        self._stream = stream
        self._run_id = stream.attempt.run_id
        self._past = past
        self._rests_on = rests_on
        self._runtime = runtime
        self._left = set(range(len(job.lines))) - past.lines
        self._handles: list[Handle | EmbeddingHandle] = []
        self._stopped = False
        self.began_at = time.monotonic()
        self._changed = threading.Condition()

    def run(self) -> None:
        """Compute the lines. Returns when the end of every line is in Redis, or after `stop`."""
        self._context.requests_from = self.began_at  # a line that comes late has not waited for the engine
        self._stream.on_line = self._note_line
        self._stream.publish(events.started(self._model.id, 0, self._runtime.incarnation.split()[0], 0))
        texts: list[tuple[int, EmbedJob, EmbeddingHandle]] = []
        for place in sorted(self._left):
            if self._stopped:
                break
            self._try(place, partial(self._begin, place, texts))
        for place, job, handle in texts:
            self._try(place, partial(self._finish_texts, place, job, handle))
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._left)

    def stop(self) -> None:
        """Cancel the lines that run; nothing more of them is published. Any thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            handles = list(self._handles)
        for handle in handles:
            handle.cancel()

    def _note_line(self, place: int) -> None:
        with self._changed:
            self._left.discard(place)
            if not self._left:
                self._changed.notify_all()

    def _try(self, place: int, step: Callable[[], None]) -> None:
        """Do a step for a line. An error ends that line only."""
        try:
            step()
        except EmbeddingCancelled:
            pass  # by `stop`
        except (TaskPredicate, SoftTimeLimitExceeded):
            raise  # the end of this attempt at the slice, not of a line
        except (InvalidJob, JobFailed) as error:
            self._tell_failure(place, error)
        except EngineError as error:
            self._tell_failure(place, failure_of(error))
        except Exception as error:
            log.exception("line %d of %s failed in an unforeseen way", place, self._run_id)
            self._tell_failure(place, JobFailed("internal_error", f"{type(error).__name__}: {error}"))

    def _begin(self, place: int, texts: list[tuple[int, EmbedJob, EmbeddingHandle]]) -> None:
        job = job_of_line(self._job.lines[place], self._model.id, self._job.priority)
        if isinstance(job, EmbedJob):
            vectors = submit_texts(self._model, job)
            texts.append((place, job, vectors))
            self._keep(vectors)
            return
        adapters, key = self._rests_on.choice if job.adapters is None else job.adapters, job.parent_key
        of_key = partial(parent_tokens, self._runtime, self._model, str(key), job.cache_scope, adapters)
        extras = RequestExtras(
            id=f"{self._run_id}{LINE_MARK}{place}",
            submitted_at=self.began_at,
            adapters=adapters,
            sampling=self._rests_on.sampling,
            seed=None if has_seed(job, self._rests_on.sampling) else self._seed_of(place),
            mode="generate",
            priority=job.priority,
            resume=resume_of(self._past, job.n, place),
            parent=() if key is None else self._reaching_redis(of_key),
        )
        self._runtime.middlewares.call(Middleware.before_request, self._context, str(place), job)
        self._keep(self._model.engine.submit(request_of(self._model, job, extras, self._runtime.signer)))

    def _keep(self, handle: Handle | EmbeddingHandle) -> None:
        with self._changed:
            self._handles.append(handle)
            late = self._stopped
        if late:
            handle.cancel()

    def _seed_of(self, place: int) -> int:
        """The seed of a line, the same in every attempt, so that the line continues as it began."""
        return zlib.crc32(f"{self._run_id.partition('#')[0]} {place}".encode()) & 0x7FFFFFFF

    def _finish_texts(self, place: int, job: EmbedJob, handle: EmbeddingHandle) -> None:
        wait_for(handle, job.timeout, self.began_at)
        self._stream.publish(events.line(place, {"result": vectors_of(self._model, job, handle)}))

    def _tell_failure(self, place: int, failure: InvalidJob | JobFailed) -> None:
        self._stream.publish(events.line(place, {"error": error_of(failure)}))

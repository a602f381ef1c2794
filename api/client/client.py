"""Submit, watch and cancel jobs. `async_client.py` has the same methods for asyncio."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Unpack

from cellama.api.batch.options import BatchOptions, BatchParams, Summary
from cellama.api.batch.progress import Progress
from cellama.config.model_options import ModelOptions
from cellama.tasks.contract.events import Event
from cellama.tasks.contract.shapes.results import Result
from cellama.tasks.contract.shapes.workers import MemoryView, ModelView
from cellama.tasks.estimates.position import Position
from cellama.tasks.state.job_list import OpenJob
from cellama.tasks.state.reader import STREAM_TIMEOUT_S
from cellama.tasks.state.records import DeadJob
from cellama.tasks.state.registry import WorkerEntry

from .adapters import AdapterControl
from .cache_control import CacheControl
from .commands import Whom
from .core import Core
from .job import Job
from .registry_views import Stats, memory_of, models_of
from .submission import Submission

LOAD_TIMEOUT_S = 600.0  # a large model takes its time
UNLOAD_TIMEOUT_S = 60.0
RESULT_AFTER_END_S = 30.0  # the result is stored right after the terminal event


class Client(Submission, AdapterControl, CacheControl):
    """Talks to the workers through Redis. Threads may share one.

    Every method raises RedisUnreachable when Redis does not answer, RedisRefused when it refuses, RedisFull if that is
    because it is full.
    """

    def __init__(self, url: str | None = None) -> None:
        """`url` is that of the Redis, in any form of docs/redis.md; without it, that of the settings counts.

        Raises ValueError for one that can't be read. What the settings say of size limits counts in any case.
        """
        self._core = Core(url)

    def job(self, job_id: str) -> Job[Result]:
        """A job that was submitted elsewhere, for instance with `generate.delay(…).id`; whether there is one, its
        methods tell."""
        return Job(self._core, job_id)

    def batch(
        self,
        input: str | Path,
        output: str | Path,
        *,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        **options: Unpack[BatchParams],
    ) -> Summary:
        """Runs every line of a file as `cellama batch run` does, to its end; the same call goes on where it ended.

        `options` are those of the command: model, ordered, errors, format, column, id_column, form, deadline_s,
        merge_identical, retry_failed, overwrite; all others are parameters for lines that do not say otherwise. Raises
        InvalidJob, OSError; what was finished is kept.
        """
        return self._core.batch(BatchOptions.of(input, output, **options), on_progress)

    def stream(
        self,
        job_id: str,
        after: int = -1,
        timeout: float = STREAM_TIMEOUT_S,
        *,
        ping: float = math.inf,
        cancel_on_exit: bool = False,
    ) -> Iterator[Event]:
        """The job's events with a `seq` above `after`: replayed, then live, to the terminal one.

        It goes on by itself when Redis was away for less than 15 s. After each `ping` seconds without an event there
        is one of type `ping`. Leaving the loop does not cancel the job, unless `cancel_on_exit` is set.
        On a finished job an `after` that is the last `seq`, or above it, ends the stream at once without an event.
        Raises InvalidJob when `after` is not a seq, JobTimeout when nothing comes for `timeout` seconds, StreamTrimmed
        when events are gone, UnknownJob.
        """
        return self._core.stream(job_id, after, timeout, ping, cancel_on_exit)

    def result(self, job_id: str, timeout: float | None = None) -> Result:
        """The result of any job (see Job.result)."""
        return self._core.result(job_id, timeout)

    def cancel(self, job_id: str) -> None:
        """Ends any job wherever it is. Idempotent; an unknown or finished job is left alone."""
        self._core.cancel(job_id)

    def position(self, job_id: str) -> Position:
        """Whether a job waits, runs or is done, how many jobs are before it, and an estimate. Raises UnknownJob."""
        return self._core.position(job_id)

    def jobs(self, model: str | None = None, *, limit: int = 1000) -> list[OpenJob]:
        """The jobs that run or wait, of one model or all, whether a worker serves it or not."""
        return self._core.jobs(model, limit)

    def purge(self, model: str) -> int:
        """Ends all jobs that wait for a model, and tells how many they were. Raises UnknownModel."""
        return self._core.purge(model)

    def dead(self) -> list[DeadJob]:
        """Jobs that were put aside because their workers died again and again, the last one first."""
        return self._core.dead()

    def requeue_dead(self, job_id: str) -> Job[Result]:
        """Queues a dead job again, as a new job. Raises UnknownJob."""
        return Job(self._core, self._core.requeue_dead(job_id))

    def workers(self) -> list[WorkerEntry]:
        """The live workers."""
        return self._core.workers()

    def models(self) -> list[ModelView]:
        """The models that live workers serve."""
        return models_of(self._core.workers())

    def memory(self, worker: str | None = None) -> list[MemoryView]:
        """Per worker: its memory budget, the devices' total and free bytes, and what each model takes of them.

        Raises UnknownWorker.
        """
        return memory_of(self._core.workers(), worker)

    def load_model(
        self,
        model_id: str | None,
        source: str,
        *,
        worker: str | None = None,
        pool: str | None = None,
        default: bool = False,
        timeout: float = LOAD_TIMEOUT_S,
        **options: Unpack[ModelOptions],
    ) -> str:
        """Loads a model on every worker, or those of a pool, and on those that join it later; or on one worker.

        Returns its id when it takes jobs; without one it gets one that no live worker has, from the name of its file.
        Which workers lack it, and why, `models()` tells. `options` are those of a `[[models]]` table.
        Raises UnknownWorker, JobTimeout, JobFailed (what a worker said, if none has the model).
        """
        model = {"id": model_id, "source": source, "default": default, **options}
        return self._core.commands.load_model(model, Whom(worker, pool), timeout)

    def unload_model(
        self,
        model_id: str,
        *,
        worker: str | None = None,
        pool: str | None = None,
        timeout: float = UNLOAD_TIMEOUT_S,
    ) -> None:
        """Unloads a model after its running jobs have ended.

        Raises as `load_model`, if no worker could; it serves on then. If some could, the others try again.
        """
        self._core.commands.unload_model(model_id, Whom(worker, pool), timeout)

    def set_default_model(self, model_id: str, *, worker: str | None = None, pool: str | None = None) -> None:
        """Serves `:default` from this model. Raises UnknownWorker, JobFailed."""
        self._core.commands.set_default_model(model_id, Whom(worker, pool))

    def stats(self) -> Stats:
        """Slots, rate and waiting jobs over all workers."""
        return self._core.stats()

    def close(self) -> None:
        """Gives the connections back."""
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

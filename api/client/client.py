"""Submits, watches and cancels jobs. `async_client.py` has the same for asyncio; they share everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from cellama.api.batch.options import BatchOptions, Summary
from cellama.api.batch.progress import Progress
from cellama.tasks import apply_chat_template, chat, detokenize, embed, generate, rerank, tokenize
from cellama.tasks.contract.events import Event
from cellama.tasks.state.job_list import OpenJob
from cellama.tasks.state.position import Position
from cellama.tasks.state.reader import STREAM_TIMEOUT_S
from cellama.tasks.state.registry import WorkerEntry

from .adapters import AdapterControl
from .core import Core
from .registry_views import memory_of, models_of

LOAD_TIMEOUT_S = 600.0  # a large model takes its time
UNLOAD_TIMEOUT_S = 60.0
RESULT_AFTER_END_S = 30.0  # the result is stored right after the terminal event


class Job:
    """A submitted job."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.id = job_id
        self._client = client

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The result. Raises JobFailed, JobCancelled, or JobTimeout after `timeout` seconds (the job goes on)."""
        return self._client.result(self.id, timeout)

    def stream(
        self,
        after: int = -1,
        timeout: float = STREAM_TIMEOUT_S,
        *,
        ping: float = math.inf,
        cancel_on_exit: bool = False,
    ) -> Iterator[Event]:
        """Its events (see Client.stream)."""
        return self._client.stream(self.id, after, timeout, ping=ping, cancel_on_exit=cancel_on_exit)

    def position(self) -> Position:
        """Whether it waits, runs or is done, and how many jobs are before it."""
        return self._client.position(self.id)

    def cancel(self) -> None:
        """Ends the job wherever it is; its slot is free within one step."""
        self._client.cancel(self.id)


class Client(AdapterControl):
    """Talks to the workers through Redis. Threads may share one.

    Every method raises RedisUnreachable when Redis does not answer, RedisRefused when it refuses, RedisFull if that is
    because it is full.
    """

    def __init__(self) -> None:
        self._core = Core()

    def generate(self, model: str, prompt: str | list[int], *, wait: bool = False, **params: Any) -> Job:
        """Submits a generation. Raises InvalidJob, and UnknownModel if nobody serves the model (unless `wait`).

        With `idempotency_key=`, the same key gives the same job, as long as its result is kept.
        """
        return Job(self, self._core.submit(generate, model, prompt, wait, params).id)

    def chat(self, model: str, messages: list[dict[str, str]], *, wait: bool = False, **params: Any) -> Job:
        """Submits a chat turn; raises as `generate`."""
        return Job(self, self._core.submit(chat, model, messages, wait, params).id)

    def embed(self, model: str, texts: str | list[str], *, wait: bool = False, **params: Any) -> Job:
        """Submits texts to embed; raises as `generate`."""
        return Job(self, self._core.submit(embed, model, texts, wait, params).id)

    def rerank(self, model: str, query: str, documents: str | list[str], *, wait: bool = False, **params: Any) -> Job:
        """Submits documents to rank for a query; raises as `generate`."""
        return Job(self, self._core.submit(rerank, model, query, wait, {"documents": documents, **params}).id)

    def generate_many(
        self, model: str, prompts: Iterable[str | list[int]], *, wait: bool = False, **params: Any
    ) -> list[Job]:
        """Submits many generations with the same parameters, much faster than one by one; jobs in order of prompts.

        All are checked before any is queued: InvalidJob names the places of all that are wrong. With
        `idempotency_keys=`, one for each, the call may be repeated, for instance after RedisUnreachable.
        """
        return self._submit_many(generate, model, prompts, wait, params)

    def chat_many(
        self, model: str, conversations: Iterable[list[dict[str, Any]]], *, wait: bool = False, **params: Any
    ) -> list[Job]:
        """Submits many chat turns, as `generate_many`."""
        return self._submit_many(chat, model, conversations, wait, params)

    def embed_many(
        self, model: str, texts: Iterable[str | list[str]], *, wait: bool = False, **params: Any
    ) -> list[Job]:
        """Submits a job for each of the texts, or lists of texts, as `generate_many`."""
        return self._submit_many(embed, model, texts, wait, params)

    def _submit_many(
        self, task: Any, model: str, contents: Iterable[Any], wait: bool, params: dict[str, Any]
    ) -> list[Job]:
        return [Job(self, job_id) for job_id in self._core.submit_many(task, model, contents, wait, params)]

    def tokenize(self, model: str, text: str, *, wait: bool = False, **params: Any) -> Job:
        """Submits a text whose token ids are wanted; raises as `generate`."""
        return Job(self, self._core.submit(tokenize, model, text, wait, params).id)

    def detokenize(self, model: str, tokens: list[int], *, wait: bool = False, **params: Any) -> Job:
        """Submits token ids whose text is wanted; raises as `generate`."""
        return Job(self, self._core.submit(detokenize, model, tokens, wait, params).id)

    def apply_chat_template(
        self, model: str, messages: list[dict[str, str]], *, wait: bool = False, **params: Any
    ) -> Job:
        """Submits a conversation whose prompt is wanted; raises as `generate`."""
        return Job(self, self._core.submit(apply_chat_template, model, messages, wait, params).id)

    def batch(
        self,
        input: str | Path,
        output: str | Path,
        *,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        **options: Any,
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
        Raises JobTimeout when nothing comes for `timeout` seconds, StreamTrimmed when events are gone, UnknownJob.
        """
        return self._core.stream(job_id, after, timeout, ping, cancel_on_exit)

    def result(self, job_id: str, timeout: float | None = None) -> dict[str, Any]:
        """The result of any job (see Job.result)."""
        return self._core.result(job_id, timeout)

    def cancel(self, job_id: str) -> None:
        """Ends any job wherever it is. Idempotent; an unknown or finished job is left alone."""
        self._core.cancel(job_id)

    def position(self, job_id: str) -> Position:
        """Whether a job waits, runs or is done, how many jobs are before it, and an estimate. Raises UnknownJob."""
        return self._core.position(job_id)

    def jobs(self, model: str | None = None, *, limit: int = 1000) -> list[OpenJob]:
        """The jobs that run or wait, of one model or all, whether anybody serves it or not."""
        return self._core.jobs(model, limit)

    def purge(self, model: str) -> int:
        """Ends all jobs that wait for a model, and tells how many they were. Raises UnknownModel."""
        return self._core.purge(model)

    def dead(self) -> list[dict[str, Any]]:
        """Jobs that were put aside because their workers died again and again, the last one first."""
        return self._core.dead()

    def requeue_dead(self, job_id: str) -> Job:
        """Queues a dead job again, as a new job. Raises UnknownJob."""
        return Job(self, self._core.requeue_dead(job_id))

    def workers(self) -> list[WorkerEntry]:
        """The live workers."""
        return self._core.workers()

    def models(self) -> list[dict[str, Any]]:
        """The models that live workers serve."""
        return models_of(self._core.workers())

    def memory(self, worker: str | None = None) -> list[dict[str, Any]]:
        """Per worker: its memory budget, the devices' total and free bytes, and what each model takes of them.

        Raises UnknownWorker.
        """
        return memory_of(self._core.workers(), worker)

    def load_model(
        self,
        model_id: str,
        source: str,
        *,
        worker: str | None = None,
        default: bool = False,
        timeout: float = LOAD_TIMEOUT_S,
        **options: Any,
    ) -> None:
        """Loads a model on every live worker, or on one, and returns when it takes jobs.

        `options` are those of a `[[models]]` table. Raises UnknownWorker, JobTimeout, JobFailed (what the worker said).
        """
        model = {"id": model_id, "source": source, "default": default, **options}
        self._core.load_model(model, worker, timeout)

    def unload_model(self, model_id: str, *, worker: str | None = None, timeout: float = UNLOAD_TIMEOUT_S) -> None:
        """Unloads a model after its running jobs have ended. Raises as `load_model`; it serves on if it is too slow."""
        self._core.unload_model(model_id, worker, timeout)

    def set_default_model(self, model_id: str, *, worker: str | None = None) -> None:
        """Serves `:default` from this model. Raises UnknownWorker, JobFailed."""
        self._core.set_default_model(model_id, worker)

    def stats(self) -> dict[str, Any]:
        """Slots, rate and waiting jobs over all workers."""
        return self._core.stats()

    def close(self) -> None:
        """Gives the connections back."""
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

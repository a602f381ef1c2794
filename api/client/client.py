"""The client, which submits, follows and cancels jobs, and controls workers.

`AsyncClient` has the same methods for asyncio.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Unpack, cast, overload

from celery.exceptions import TaskRevokedError, TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult
from typing_extensions import TypeVar

from cellama.api.batch.frames import RowsInMemory, run_rows
from cellama.api.batch.options import BatchOptions, BatchParams, Summary
from cellama.api.batch.start import OnProgress, run_batch
from cellama.config import id_of_source
from cellama.config.model_options import ModelOptions
from cellama.tasks import app
from cellama.tasks.broker.control import purge_queue
from cellama.tasks.connection.connections import CONNECT_TIMEOUT_S, connect
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.all_kinds import KINDS, Result
from cellama.tasks.contract.errors import (
    InvalidJob,
    JobCancelled,
    JobTimeout,
    RedisUnreachable,
    ResultIgnored,
    UnknownJob,
    UnknownModel,
)
from cellama.tasks.contract.events import Event
from cellama.tasks.contract.keys import IGNORED_FIELD, job_key
from cellama.tasks.contract.kinds.chat import TASK_CHAT, ChatResult
from cellama.tasks.contract.kinds.embed import TASK_EMBED, EmbedResult
from cellama.tasks.contract.kinds.generate import TASK_GENERATE, GenerateResult
from cellama.tasks.contract.kinds.prefill import TASK_PREFILL, PrefillResult
from cellama.tasks.contract.kinds.rerank import TASK_RERANK, RerankResult
from cellama.tasks.contract.kinds.tokens import (
    TASK_APPLY_CHAT_TEMPLATE,
    TASK_DETOKENIZE,
    TASK_TOKENIZE,
    DetokenizeResult,
    TemplateResult,
    TokenizeResult,
)
from cellama.tasks.contract.names import DEFAULT_MODEL, evicting_key, failure_key, model_named, queue_keys, queue_name
from cellama.tasks.contract.payloads import parse_job
from cellama.tasks.contract.shapes.parameters import Messages, Prompt, Texts, TextsOrTokens
from cellama.tasks.contract.shapes.workers import (
    AdapterView,
    CachedPrefix,
    CacheHit,
    MemoryView,
    ModelView,
    WorkerAdapter,
)
from cellama.tasks.estimates.position import Position, eta_by_class, position_of, running_jobs, waiting_by_class
from cellama.tasks.jobs import app_at
from cellama.tasks.state.job_list import OpenJob, open_jobs, queued_models
from cellama.tasks.state.ledger import DeadJob, Ledger
from cellama.tasks.state.reader import STREAM_TIMEOUT_S, EventCursor, stream_events
from cellama.tasks.state.registry import WorkerEntry, is_served, live_workers
from cellama.tasks.state.tenants import TenantShare, tenant_shares
from cellama.tasks.state.unserved import UnservedWait, model_hint
from cellama.tasks.typed_tasks import (
    ChatParams,
    DetokenizeParams,
    EmbedParams,
    GenerateParams,
    PrefillParams,
    RerankParams,
    TemplateParams,
    TokenizeParams,
)

from .cache_explanation import CacheExplanation, explain
from .commands import REPLY_TIMEOUT_S, Commands, CommandTarget
from .registry_views import Stats, memory_of, models_of, queues, stats

RESULT_POLL_S = 5.0  # the maximum delay of a result that is stored while Celery subscribes, which it may miss
RESULT_TIMEOUT_S = 30.0  # after the terminal event, immediately after which the result is stored
LOAD_TIMEOUT_S = 600.0  # time for a large model, which may be downloaded first
UNLOAD_TIMEOUT_S = 60.0  # time for running jobs of the model to finish
ADAPTER_LOAD_TIMEOUT_S = 120.0  # adapters have a few hundred megabytes
ADAPTER_UNLOAD_TIMEOUT_S = 60.0  # time for jobs that use the adapter to finish
EVICT_TIMEOUT_S = 60.0  # time for KV states to be written to disk
OUTAGE_S = 15.0  # readers of a stream wait this long for Redis: longer than a failover
OUTAGE_RETRY_S = 0.5  # pause between attempts to resume a stream: shorter than a restart of Redis

R = TypeVar("R", covariant=True, default=Result)
FrameT = TypeVar("FrameT")  # a DataFrame of pandas or polars, or a Table of pyarrow


class Job(Generic[R]):
    """A submitted job. `R` is the type of the job's result."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.id = job_id
        self._client = client

    def result(self, timeout: float | None = None) -> R:
        """Wait for the result and return it.

        Raises JobFailed, JobCancelled, or JobTimeout after `timeout` seconds. The job continues after a JobTimeout.
        """
        return cast(R, self._client.result(self.id, timeout))

    def stream(
        self,
        after: int = -1,
        timeout: float = STREAM_TIMEOUT_S,
        *,
        ping: float = math.inf,
        cancel_on_exit: bool = False,
    ) -> Iterator[Event]:
        """Yield the events of the job (see `Client.stream`)."""
        return self._client.stream(self.id, after, timeout, ping=ping, cancel_on_exit=cancel_on_exit)

    def position(self) -> Position:
        """Return whether the job is waiting, running or done, and how many jobs are ahead of it."""
        return self._client.position(self.id)

    def cancel(self) -> None:
        """Cancel the job, whether it is waiting or running. A running job stops within one step."""
        self._client.cancel(self.id)


class Client:
    """Submits jobs to workers and controls workers through Redis. Threads can share a client.

    Every method raises RedisUnreachable if Redis does not answer, RedisRefused if Redis rejects a command, and
    RedisFull if Redis is out of memory.
    """

    def __init__(self, url: str | None = None) -> None:
        """Create a client for the Redis server at `url` (default: the `redis_url` setting).

        The client connects when it sends its first command. The size limits in the settings apply to every URL.
        Raises ValueError if `url` is not a Redis URL.
        """
        self._url = url
        self._app = app if url is None else app_at(url)
        self._redis = connect(url, socket_connect_timeout=CONNECT_TIMEOUT_S)
        self._commands = Commands(self._app, self.workers)

    # Submit jobs

    def generate(
        self,
        model: str,
        prompt: Prompt,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        fairness_key: str | None = None,
        **params: Unpack[GenerateParams],
    ) -> Job[GenerateResult]:
        """Submit a prompt for the model to continue.

        With `wait`, the job is queued even if no worker serves the model. A second call with the same `idempotency_key`
        returns the same job while the job's result is stored. `fairness_key` identifies the tenant that the job belongs
        to (docs/fair-share.md). Raises InvalidJob, and UnknownModel if no worker serves the model.
        """
        return self._submit(TASK_GENERATE, model, prompt, wait, idempotency_key, fairness_key, params)

    def chat(
        self,
        model: str,
        messages: Messages,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        fairness_key: str | None = None,
        **params: Unpack[ChatParams],
    ) -> Job[ChatResult]:
        """Submit a conversation for the model to answer. Raises the same errors as `generate`."""
        return self._submit(TASK_CHAT, model, messages, wait, idempotency_key, fairness_key, params)

    def prefill(
        self,
        model: str,
        prompt: Prompt | None = None,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        fairness_key: str | None = None,
        **params: Unpack[PrefillParams],
    ) -> Job[PrefillResult]:
        """Submit a prefix to prefill into the cache for later jobs.

        The prefix is a `prompt`, or the `messages` or the `system` message of a chat. To continue a prefix, pass the
        `finish_key` of its result as the `parent_key` of a later job. Raises the same errors as `generate`.
        """
        return self._submit(TASK_PREFILL, model, prompt, wait, idempotency_key, fairness_key, params)

    def embed(
        self,
        model: str,
        texts: TextsOrTokens,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        fairness_key: str | None = None,
        **params: Unpack[EmbedParams],
    ) -> Job[EmbedResult]:
        """Submit texts or token ids to embed. Raises the same errors as `generate`."""
        return self._submit(TASK_EMBED, model, texts, wait, idempotency_key, fairness_key, params)

    def rerank(
        self,
        model: str,
        query: str,
        documents: Texts,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        fairness_key: str | None = None,
        **params: Unpack[RerankParams],
    ) -> Job[RerankResult]:
        """Submit documents to rank by their relevance to a query. Raises the same errors as `generate`."""
        return self._submit(
            TASK_RERANK, model, query, wait, idempotency_key, fairness_key, {"documents": documents, **params}
        )

    def generate_many(
        self,
        model: str,
        prompts: Iterable[Prompt],
        *,
        wait: bool = False,
        idempotency_keys: Sequence[str] | None = None,
        fairness_key: str | None = None,
        **params: Unpack[GenerateParams],
    ) -> list[Job[GenerateResult]]:
        """Submit many prompts with the same parameters, and return the jobs in the same order.

        One call for many prompts is much faster than calling `generate` for each prompt. All prompts are checked before
        any job is queued, and InvalidJob lists the indexes of all invalid prompts. If `idempotency_keys` contains a key
        for each prompt, the call can safely be repeated, for example after RedisUnreachable.
        """
        return self._submit_many(TASK_GENERATE, model, prompts, wait, idempotency_keys, fairness_key, params)

    def chat_many(
        self,
        model: str,
        conversations: Iterable[Messages],
        *,
        wait: bool = False,
        idempotency_keys: Sequence[str] | None = None,
        fairness_key: str | None = None,
        **params: Unpack[ChatParams],
    ) -> list[Job[ChatResult]]:
        """Submit many conversations for the model to answer, as `generate_many` does for prompts."""
        return self._submit_many(TASK_CHAT, model, conversations, wait, idempotency_keys, fairness_key, params)

    def embed_many(
        self,
        model: str,
        texts: Iterable[TextsOrTokens],
        *,
        wait: bool = False,
        idempotency_keys: Sequence[str] | None = None,
        fairness_key: str | None = None,
        **params: Unpack[EmbedParams],
    ) -> list[Job[EmbedResult]]:
        """Submit one embedding job for each text or list of texts, as `generate_many` does for prompts."""
        return self._submit_many(TASK_EMBED, model, texts, wait, idempotency_keys, fairness_key, params)

    def tokenize(
        self,
        model: str,
        text: str,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        fairness_key: str | None = None,
        **params: Unpack[TokenizeParams],
    ) -> Job[TokenizeResult]:
        """Submit text to convert into token ids. Raises the same errors as `generate`."""
        return self._submit(TASK_TOKENIZE, model, text, wait, idempotency_key, fairness_key, params)

    def detokenize(
        self,
        model: str,
        tokens: list[int],
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        fairness_key: str | None = None,
        **params: Unpack[DetokenizeParams],
    ) -> Job[DetokenizeResult]:
        """Submit token ids to convert into text. Raises the same errors as `generate`."""
        return self._submit(TASK_DETOKENIZE, model, tokens, wait, idempotency_key, fairness_key, params)

    def apply_chat_template(
        self,
        model: str,
        messages: Messages,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        fairness_key: str | None = None,
        **params: Unpack[TemplateParams],
    ) -> Job[TemplateResult]:
        """Submit a conversation to render as a prompt. Raises the same errors as `generate`."""
        return self._submit(TASK_APPLY_CHAT_TEMPLATE, model, messages, wait, idempotency_key, fairness_key, params)

    def _submit(
        self,
        name: str,
        model: str,
        content: Any,
        wait: bool,
        key: str | None,
        fairness_key: str | None,
        params: Mapping[str, Any],
    ) -> Job[Any]:
        task = self._app.tasks[name]
        task.parse((model, content), params)  # reports invalid jobs even if Redis is unreachable
        with reaching_redis(self._url):
            if not wait:
                self._check_served(model)
            options = {"idempotency_key": key, "fairness_key": fairness_key}
            return Job(self, task.apply_async((model, content), dict(params), **options).id)

    def _submit_many(
        self,
        name: str,
        model: str,
        contents: Iterable[Any],
        wait: bool,
        keys: Sequence[str] | None,
        fairness_key: str | None,
        params: Mapping[str, Any],
    ) -> list[Job[Any]]:
        task = self._app.tasks[name]
        jobs = task.check_many([((model, content), dict(params)) for content in contents], keys, fairness_key)
        with reaching_redis(self._url):
            if not wait:
                self._check_served(model)
            return [Job(self, job_id) for job_id in task.queue_many(jobs)]

    def _check_served(self, model: str) -> None:
        model = model_named(model)
        served = [m["id"] for worker in live_workers(self._redis) for m in worker.models if is_served(m)]
        if model in served or (model == DEFAULT_MODEL and served):
            return
        if not served:
            raise UnknownModel(
                f"no worker is running, so no worker serves {model!r}; start one with `cellama up` or `cellama "
                "worker`, or queue the job without a worker (--wait, or wait=True in Python)"
            )
        raise UnknownModel(f"no running worker serves the model {model!r}; {model_hint(model, served)}")

    def job(self, job_id: str) -> Job[Result]:
        """Return the job with this id, for example `generate.delay(…).id`.

        This method does not connect to Redis. The job's methods raise UnknownJob if the job does not exist.
        """
        return Job(self, job_id)

    @overload
    def batch(  # type: ignore[overload-overlap]  # a str is a sequence of strings
        self, input: str | Path, output: str | Path, *, on_progress: OnProgress = ..., **options: Unpack[BatchParams]
    ) -> Summary: ...

    @overload
    def batch(
        self,
        input: RowsInMemory,
        output: str | Path | None = None,
        *,
        on_progress: OnProgress = ...,
        **options: Unpack[BatchParams],
    ) -> list[dict[str, Any]]: ...

    @overload
    def batch(
        self,
        input: FrameT,
        output: str | Path | None = None,
        *,
        on_progress: OnProgress = ...,
        **options: Unpack[BatchParams],
    ) -> FrameT: ...

    def batch(
        self,
        input: object,
        output: str | Path | None = None,
        *,
        on_progress: OnProgress = lambda progress: None,
        **options: Unpack[BatchParams],
    ) -> object:
        """Run every row of a file or an in-memory table as a job, as `cellama batch run` does.

        `input` is a path or URL, a pandas or polars DataFrame, a pyarrow Table, or an iterable of dictionaries or
        strings. For a file, the call writes the output and returns a Summary. For rows in memory, the call returns the
        rows with their results in an object of the same kind, or in a list of dictionaries. Failed rows are omitted and
        cause a warning. If `output` is given, or `input` is a file, repeating the call resumes an interrupted run.

        The command's options are keyword arguments (`as_kind` is `--as`, and `ordered=True` is `--order input`).
        All other keyword arguments are job parameters. Raises InvalidJob or OSError. Finished rows are saved in the
        output even if the call raises.
        """
        with reaching_redis(self._url):
            self._redis.ping()

        def run(found: BatchOptions) -> Summary:
            return run_batch(self._redis, self._app, found, on_progress=on_progress)

        if not isinstance(input, (str, Path)):
            return run_rows(input, output, dict(options), run)
        if output is None:
            raise InvalidJob("output is missing; specify an output file, for example 'out.parquet'")
        return run(BatchOptions.of(input, output, **options))

    # Follow and cancel jobs

    def stream(
        self,
        job_id: str,
        after: int = -1,
        timeout: float = STREAM_TIMEOUT_S,
        *,
        ping: float = math.inf,
        cancel_on_exit: bool = False,
    ) -> Iterator[Event]:
        """Yield the events of a job whose `seq` is above `after`, up to and including the terminal event.

        Events that were already published come first, followed by new events as they arrive. The stream resumes
        automatically after a Redis outage of less than 15 s. With `ping`, a `ping` event is yielded after every `ping`
        seconds without an event. With `cancel_on_exit`, leaving the loop cancels the job. If the job has finished and
        `after` is its last `seq` or higher, no events are yielded. Raises InvalidJob if `after` is not a `seq`,
        JobTimeout if no event arrives for `timeout` seconds, StreamTrimmed if events were deleted, and UnknownJob.
        """
        return self._stream(EventCursor(job_id, after), timeout, ping, cancel_on_exit)

    def _stream(self, cursor: EventCursor, timeout_s: float, ping_s: float, cancel_on_exit: bool) -> Iterator[Event]:
        outage = Outage(self._url)
        try:
            while not cursor.ended:
                with outage.tolerated():
                    for event in stream_events(
                        self._redis, cursor.job_id, timeout_s=timeout_s, ping_s=ping_s, cursor=cursor
                    ):
                        outage.clear()
                        yield event
                if not cursor.ended:
                    time.sleep(OUTAGE_RETRY_S)
        finally:
            if cancel_on_exit and not cursor.ended:
                self.cancel(cursor.job_id)

    def result(self, job_id: str, timeout: float | None = None) -> Result:
        """Wait for a job's result and return it (see `Job.result`)."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        unserved = unserved_wait(self)
        with reaching_redis(self._url):
            self._check_stored(job_id)
            while True:
                remaining_s = max(0.0, deadline - time.monotonic())
                try:
                    handle = AsyncResult(job_id, app=self._app)
                    handle.ready()  # if the result is stored, Celery does not subscribe
                    result: Result = handle.get(timeout=min(RESULT_POLL_S, remaining_s), interval=0.05)
                    return result
                except CeleryTimeoutError:
                    if remaining_s <= RESULT_POLL_S:
                        raise result_timeout(job_id, timeout) from None
                    unserved.check([job_id])
                except TaskRevokedError:
                    raise JobCancelled(f"job {job_id} was cancelled") from None

    def _check_stored(self, job_id: str) -> None:
        if self._redis.hexists(job_key(job_id), IGNORED_FIELD):
            raise ResultIgnored(
                f"job {job_id} was queued with ignore_result, so its result is not stored; read its stream instead"
            )

    def cancel(self, job_id: str) -> None:
        """Cancel a job, whether it is waiting or running.

        The call has no effect if the job is unknown or has finished.
        """
        with reaching_redis(self._url):
            self._app.control.revoke(job_id, terminate=True)

    def position(self, job_id: str) -> Position:
        """Return whether a job is waiting, running or done, how many jobs are ahead of it, and when it may start.

        Raises UnknownJob.
        """
        with reaching_redis(self._url):
            return position_of(self._redis, job_id)

    def jobs(self, model: str | None = None, *, limit: int = 1000) -> list[OpenJob]:
        """Return up to `limit` running and waiting jobs for one model, or for all models, including unserved models."""
        with reaching_redis(self._url):
            return open_jobs(self._redis, model, limit)

    def tenants(self) -> list[TenantShare]:
        """Return the tenants that have jobs or a weight, or were served in the last hour (docs/fair-share.md)."""
        with reaching_redis(self._url):
            return tenant_shares(self._redis)

    def purge(self, model: str) -> int:
        """Cancel all of a model's waiting jobs, and return the number of cancelled jobs. Raises UnknownModel."""
        with reaching_redis(self._url):
            known = (*queues(live_workers(self._redis), queued_models(self._redis)), DEFAULT_MODEL)
            if model not in known and not any(self._queue_depths([model]).values()):
                queued = ", ".join(queued_models(self._redis)) or "none"
                raise UnknownModel(
                    f"no worker serves the model {model!r}, and no job is waiting for it; models with jobs: {queued}"
                )
            return purge_queue(self._app, queue_name(model))

    def dead(self) -> list[DeadJob]:
        """Return the dead jobs, newest first.

        Dead jobs are no longer retried, because their workers crashed repeatedly.
        """
        with reaching_redis(self._url):
            return Ledger(self._redis).dead()

    def requeue_dead(self, job_id: str) -> Job[Result]:
        """Requeue a dead job under a new id, and return the new job. Raises UnknownJob."""
        with reaching_redis(self._url):
            new_id = Ledger(self._redis).requeue_dead(job_id)
        if new_id is None:
            raise UnknownJob(f"{job_id} is not a dead job; list the dead jobs with `cellama dead list`")
        return Job(self, new_id)

    # Control workers and their models

    def workers(self) -> list[WorkerEntry]:
        """Return the running workers, as reported in their last heartbeats."""
        with reaching_redis(self._url):
            return live_workers(self._redis)

    def models(self) -> list[ModelView]:
        """Return the models that workers are serving, are loading, or have failed to load."""
        return models_of(self.workers())

    def memory(self, worker: str | None = None) -> list[MemoryView]:
        """Return the memory budget, devices and models of all workers, or only of `worker` if it is given.

        Raises UnknownWorker.
        """
        return memory_of(self.workers(), worker)

    def stats(self) -> Stats:
        """Return the total number of slots, the total token rate, and the waiting jobs of each model."""
        workers = self.workers()
        with reaching_redis(self._url):
            models = queues(workers, queued_models(self._redis))
            waiting = waiting_by_class(self._redis, models)
            eta_s = partial(eta_by_class, self._redis, workers, running_jobs(self._redis))
            return stats(workers, self._queue_depths(models), waiting, eta_s)

    def _queue_depths(self, models: list[str]) -> dict[str, int]:
        pipeline = self._redis.pipeline(transaction=False)
        for model in models:
            for key in queue_keys(model):
                pipeline.llen(key)
        lengths = iter(pipeline.execute())
        return {model: sum(next(lengths) for _ in queue_keys(model)) for model in models}

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
        """Load a model on workers, and return the model's id when it is ready for jobs.

        The model is loaded on all workers, on the workers in a `pool`, or on one `worker`. Workers that join the pool
        later also load the model. With `model_id=None`, the client derives a unique id from the file name. `options`
        contains options as in a `[[models]]` table in the settings. `models()` returns the errors of workers that could
        not load the model. Raises UnknownWorker, JobTimeout, and JobFailed if no worker could load the model.
        """
        if model_id is None:
            workers = self.workers()
            taken = {thing["model"] for entry in workers for thing in entry.wanted}
            taken |= {loaded["id"] for entry in workers for loaded in entry.models}
            model_id = id_of_source(source, taken)
        model = {"id": model_id, "source": source, "default": default, **options}
        accepted = self._commands.send("cellama_load", {"model": model}, CommandTarget(worker, pool))
        self._commands.wait_for_status(accepted, model_id, _state_of_model(model_id), "ready", timeout)
        return model_id

    def unload_model(
        self, model_id: str, *, worker: str | None = None, pool: str | None = None, timeout: float = UNLOAD_TIMEOUT_S
    ) -> None:
        """Unload a model from workers after its running jobs have finished.

        Raises the same errors as `load_model`. If no worker could unload the model, the model stays in service. If only
        some workers could unload the model, the other workers retry.
        """
        arguments = {"model_id": model_id, "timeout_s": timeout}
        accepted = self._commands.send("cellama_unload", arguments, CommandTarget(worker, pool))
        self._commands.wait_for_status(accepted, model_id, _status_of_model(model_id), None, timeout + REPLY_TIMEOUT_S)

    def set_default_model(self, model_id: str, *, worker: str | None = None, pool: str | None = None) -> None:
        """Make a model the default model, which runs jobs for `:default`. Raises UnknownWorker or JobFailed."""
        self._commands.send("cellama_default", {"model_id": model_id}, CommandTarget(worker, pool))

    # Control LoRA adapters. Each method acts on all workers with the model, on the workers of a pool, or on one worker.
    # Workers that join the pool later do the same.

    def adapters(self, model_id: str) -> list[AdapterView]:
        """Return a model's LoRA adapters on all workers.

        If workers use different files or scales for the same name, each variant has its own entry. Raises
        UnknownModel.
        """
        workers = self.workers()
        known = {model["id"] for worker in workers for model in worker.models}
        if model_id not in known:
            raise UnknownModel(
                f"no running worker serves the model {model_id!r}; models: {', '.join(sorted(known)) or 'none'}"
            )
        found: dict[tuple[str, str, float, str], AdapterView] = {}
        for worker in workers:
            for adapter in _adapters_of(worker, model_id):
                key = (adapter["name"], adapter["fingerprint"], adapter["scale"], adapter["status"])
                entry = found.setdefault(key, {**adapter, "in_use": 0, "workers": []})
                entry["in_use"] += adapter["in_use"]
                entry["workers"].append(worker.name)
        return [found[key] for key in sorted(found)]

    def load_adapter(
        self,
        model_id: str,
        name: str,
        source: str,
        *,
        scale: float = 1.0,
        worker: str | None = None,
        pool: str | None = None,
        timeout: float = ADAPTER_LOAD_TIMEOUT_S,
    ) -> None:
        """Load a LoRA adapter for a model, and return when jobs can use it.

        From then on, jobs that don't choose adapters use the adapter with this scale. With scale 0, only jobs that
        request the adapter use it. `models()` returns the errors of workers that could not load the adapter. Raises
        UnknownModel, UnknownWorker, JobTimeout, and JobFailed if no worker could load the adapter.
        """
        arguments = {"model_id": model_id, "name": name, "source": source, "scale": scale}
        accepted = self._commands.send("cellama_load_adapter", arguments, CommandTarget(worker, pool), model_id)
        status = _status_of_adapter(model_id, name)
        self._commands.wait_for_status(accepted, failure_key(model_id, name), status, "ready", timeout)

    def set_adapter_scale(
        self, model_id: str, name: str, scale: float, *, worker: str | None = None, pool: str | None = None
    ) -> None:
        """Change an adapter's scale for new jobs that don't choose adapters.

        Raises the same errors as `load_adapter`.
        """
        arguments = {"model_id": model_id, "name": name, "scale": scale}
        self._commands.send("cellama_scale_adapter", arguments, CommandTarget(worker, pool), model_id)

    def unload_adapter(
        self,
        model_id: str,
        name: str,
        *,
        worker: str | None = None,
        pool: str | None = None,
        timeout: float = ADAPTER_UNLOAD_TIMEOUT_S,
    ) -> None:
        """Unload an adapter after the jobs that use it have finished.

        Raises the same errors as `load_adapter`. If no worker could unload the adapter, the adapter stays in use. If
        only some workers could unload the adapter, the other workers retry.
        """
        arguments = {"model_id": model_id, "name": name, "timeout_s": timeout}
        accepted = self._commands.send("cellama_unload_adapter", arguments, CommandTarget(worker, pool), model_id)
        status = _status_of_adapter(model_id, name)
        self._commands.wait_for_status(accepted, failure_key(model_id, name), status, None, timeout + REPLY_TIMEOUT_S)

    # Inspect and control KV caches

    def cached_prefix(
        self, model: str, prompt: Prompt | None = None, *, worker: str | None = None, **params: Unpack[PrefillParams]
    ) -> list[CachedPrefix]:
        """Return how much of a prompt or a chat's `messages` is in each worker's cache, and in which tier.

        The worker with the longest cached prefix comes first. The call does not wait for the engine and does not change
        the cache. `params` takes the parameters of `prefill` except `parent_key`. The text may contain up to 100,000
        characters. Pass longer text as token ids. Raises InvalidJob, UnknownModel, UnknownWorker and JobFailed.
        """
        parse_job(KINDS[TASK_PREFILL].payload, (), (), {"model": model, "prompt": prompt, **params})
        model_id = None if model == DEFAULT_MODEL else model
        replies = self._commands.call(
            "cellama_cached_prefix",
            {"job": {"model": model, "prompt": prompt, **params}},
            CommandTarget(worker),
            model_id,
        )
        found = [cast(CachedPrefix, {"worker": name, **reply["ok"]}) for name, reply in replies.items()]
        return sorted(found, key=lambda prefix: (-prefix["cached_tokens"], prefix["worker"]))

    def explain_cache(self, job_id: str) -> CacheExplanation:
        """Return how much of a finished job's prompt was reused, and why the rest was not reused.

        `job_id` may also be the id of a gateway answer, such as `resp_…`, `msg_…` or `chatcmpl-…`.
        The explanation is available for `event_ttl_s` after the job ends. Raises UnknownJob.
        """
        with reaching_redis(self._url):
            return explain(self._redis, job_id, self._text_of)

    def _text_of(self, model: str, tokens: list[int]) -> str:
        return self.detokenize(model, tokens).result(RESULT_TIMEOUT_S)["text"]

    def last_cache_hit(self, model_id: str) -> dict[str, CacheHit | None]:
        """Return how much of the most recently started job's prompt was in the cache, for each worker with the model.

        A worker's value is None before its first job. The values come from the workers' last heartbeats. Raises
        UnknownModel.
        """
        found = {w.name: m.get("last_cache_hit") for w in self.workers() for m in w.models if m["id"] == model_id}
        if not found:
            raise UnknownModel(
                f"no running worker serves the model {model_id!r}; list the models with `cellama models list`"
            )
        return found

    def evict(
        self, model_id: str, *, worker: str | None = None, pool: str | None = None, timeout: float = EVICT_TIMEOUT_S
    ) -> None:
        """Evict a model's KV states from idle slots and from the RAM tier.

        If `cache_dir` is set, valuable states are first written to disk. The model stays loaded, and jobs continue.
        Raises UnknownModel, UnknownWorker, JobTimeout and JobFailed.
        """
        accepted = self._commands.send("cellama_evict", {"model_id": model_id}, CommandTarget(worker, pool), model_id)

        def status(entry: WorkerEntry) -> str | None:
            return "evicted" if entry.evicted.get(model_id, 0.0) >= accepted.get(entry.name, 0.0) else None

        self._commands.wait_for_status(accepted, evicting_key(model_id), status, "evicted", timeout)

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Outage:
    """Suppresses RedisUnreachable errors until Redis has been unreachable for OUTAGE_S seconds."""

    def __init__(self, url: str | None = None) -> None:
        self._url = url
        self._since: float | None = None

    def clear(self) -> None:
        """Record that Redis is answering again."""
        self._since = None

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Suppress RedisUnreachable inside the `with` block, unless the outage has already lasted for OUTAGE_S."""
        try:
            with reaching_redis(self._url):
                yield
        except RedisUnreachable:
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since > OUTAGE_S:
                raise


def has_result(client: Client, job_id: str) -> bool:
    """Return whether a job's result is stored. Raises ResultIgnored."""
    with reaching_redis(client._url):
        client._check_stored(job_id)
        return bool(AsyncResult(job_id, app=client._app).ready())


def unserved_wait(client: Client) -> UnservedWait:
    """Return a check for a caller that starts waiting now. The check ends jobs whose model no worker serves."""
    wait: UnservedWait = client._app.backend.unserved_wait()
    return wait


def result_timeout(job_id: str, timeout_s: float | None) -> JobTimeout:
    return JobTimeout(
        f"job {job_id} has no result after {timeout_s} s, but continues; call result() again, or cancel it"
    )


def _status_of_model(model_id: str) -> Callable[[WorkerEntry], str | None]:
    return lambda worker: next((str(m["status"]) for m in worker.models if m["id"] == model_id), None)


def _state_of_model(model_id: str) -> Callable[[WorkerEntry], str | None]:
    """Return a function that returns "ready" if a worker serves the model, or will load it on demand."""
    return lambda worker: next(
        ("ready" if is_served(m) else str(m["status"]) for m in worker.models if m["id"] == model_id), None
    )


def _status_of_adapter(model_id: str, name: str) -> Callable[[WorkerEntry], str | None]:
    return lambda worker: next((str(a["status"]) for a in _adapters_of(worker, model_id) if a["name"] == name), None)


def _adapters_of(worker: WorkerEntry, model_id: str) -> list[WorkerAdapter]:
    return [adapter for m in worker.models if m["id"] == model_id for adapter in m.get("adapters", [])]

"""Submit, watch and cancel jobs, and control workers. `async_client.py` has the same methods for asyncio."""

from __future__ import annotations

import contextlib
import difflib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Unpack, cast

from celery.exceptions import TaskRevokedError, TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult
from typing_extensions import TypeVar

from cellama.api.batch.options import BatchOptions, BatchParams, Progress, Summary
from cellama.api.batch.start import run_batch
from cellama.config import id_of_source
from cellama.config.model_options import ModelOptions
from cellama.tasks import app
from cellama.tasks.broker.control import purge_queue
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.all_kinds import KINDS, Result
from cellama.tasks.contract.errors import (
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
from cellama.tasks.contract.names import DEFAULT_MODEL, evicting_key, failure_key, queue_keys, queue_name
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
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.reader import STREAM_TIMEOUT_S, EventCursor, stream_events
from cellama.tasks.state.records import DeadJob
from cellama.tasks.state.registry import WorkerEntry, live_workers
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

from .commands import REPLY_S, Commands, Whom
from .registry_views import Stats, memory_of, models_of, queues, stats

CONNECT_TIMEOUT_S = 3.0  # a Redis in reach accepts a connection at once; without it, callers learn soon that it is away
RESULT_POLL_S = 5.0  # a result that comes while Celery subscribes may be missed: how late it is then
RESULT_AFTER_END_S = 30.0  # the result is stored right after the terminal event
LOAD_TIMEOUT_S = 600.0  # for a large model, or one that is downloaded first
UNLOAD_TIMEOUT_S = 60.0  # for the jobs that have the model
ADAPTER_LOAD_TIMEOUT_S = 120.0  # adapters are some hundred megabytes
ADAPTER_UNLOAD_TIMEOUT_S = 60.0  # for the jobs that have the adapter
EVICT_TIMEOUT_S = 60.0  # KV states are written to disk meanwhile
OUTAGE_S = 15.0  # for Redis to come back, while a stream is read: a failover takes less
OUTAGE_RETRY_S = 0.5  # between attempts to read on: short beside a restart of Redis

R = TypeVar("R", covariant=True, default=Result)


class Job(Generic[R]):
    """A submitted job; `R` is the type of its result."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.id = job_id
        self._client = client

    def result(self, timeout: float | None = None) -> R:
        """Return the result. Raises JobFailed, JobCancelled, or JobTimeout after `timeout` seconds.

        The job continues after a JobTimeout.
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
        """Yield its events (see Client.stream)."""
        return self._client.stream(self.id, after, timeout, ping=ping, cancel_on_exit=cancel_on_exit)

    def position(self) -> Position:
        """Return whether the job waits, runs or is done, and how many jobs are before it."""
        return self._client.position(self.id)

    def cancel(self) -> None:
        """Cancel the job wherever it is; its slot is free within one step."""
        self._client.cancel(self.id)


class Client:
    """Talks to the workers through Redis. Threads may share one.

    Every method raises RedisUnreachable when Redis does not answer, RedisRefused when it refuses a command, RedisFull
    if it refuses because it is full.
    """

    def __init__(self, url: str | None = None) -> None:
        """`url` is that of the Redis, in any form of docs/redis.md; without it, that of the settings counts.

        Raises ValueError if it is not the URL of a Redis. Size limits are those of the settings in any case.
        """
        self._url = url
        self._app = app if url is None else app_at(url)
        self._redis = connect(url, socket_connect_timeout=CONNECT_TIMEOUT_S)
        self._commands = Commands(self._app, self.workers)

    # Submitting

    def generate(
        self,
        model: str,
        prompt: Prompt,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[GenerateParams],
    ) -> Job[GenerateResult]:
        """Submit a generation. Raises InvalidJob, and UnknownModel if no worker serves the model (unless `wait`).

        With `idempotency_key=`, a second call with the same key returns the same job, as long as its result is kept.
        """
        return self._submit(TASK_GENERATE, model, prompt, wait, idempotency_key, params)

    def chat(
        self,
        model: str,
        messages: Messages,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[ChatParams],
    ) -> Job[ChatResult]:
        """Submit a chat turn; raises as `generate`."""
        return self._submit(TASK_CHAT, model, messages, wait, idempotency_key, params)

    def prefill(
        self,
        model: str,
        prompt: Prompt | None = None,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[PrefillParams],
    ) -> Job[PrefillResult]:
        """Submit a prefix of later jobs, which is prefilled into the cache: a prompt, or the `messages` (or the
        `system`) of a chat. Later jobs continue it with the `finish_key` of its result as their `parent_key`. Raises
        as `generate`.
        """
        return self._submit(TASK_PREFILL, model, prompt, wait, idempotency_key, params)

    def embed(
        self,
        model: str,
        texts: TextsOrTokens,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[EmbedParams],
    ) -> Job[EmbedResult]:
        """Submit texts, or token ids, to embed; raises as `generate`."""
        return self._submit(TASK_EMBED, model, texts, wait, idempotency_key, params)

    def rerank(
        self,
        model: str,
        query: str,
        documents: Texts,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[RerankParams],
    ) -> Job[RerankResult]:
        """Submit documents to rank for a query; raises as `generate`."""
        return self._submit(TASK_RERANK, model, query, wait, idempotency_key, {"documents": documents, **params})

    def generate_many(
        self,
        model: str,
        prompts: Iterable[Prompt],
        *,
        wait: bool = False,
        idempotency_keys: Sequence[str] | None = None,
        **params: Unpack[GenerateParams],
    ) -> list[Job[GenerateResult]]:
        """Submit many generations with the same parameters, much faster than one by one. Jobs are in order of prompts.

        All are checked before any is queued: InvalidJob names the indexes of all that are invalid. With
        `idempotency_keys=`, one for each, the call may be repeated, for instance after RedisUnreachable.
        """
        return self._submit_many(TASK_GENERATE, model, prompts, wait, idempotency_keys, params)

    def chat_many(
        self,
        model: str,
        conversations: Iterable[Messages],
        *,
        wait: bool = False,
        idempotency_keys: Sequence[str] | None = None,
        **params: Unpack[ChatParams],
    ) -> list[Job[ChatResult]]:
        """Submit many chat turns, as `generate_many`."""
        return self._submit_many(TASK_CHAT, model, conversations, wait, idempotency_keys, params)

    def embed_many(
        self,
        model: str,
        texts: Iterable[TextsOrTokens],
        *,
        wait: bool = False,
        idempotency_keys: Sequence[str] | None = None,
        **params: Unpack[EmbedParams],
    ) -> list[Job[EmbedResult]]:
        """Submit a job for each of the texts, or lists of texts, as `generate_many`."""
        return self._submit_many(TASK_EMBED, model, texts, wait, idempotency_keys, params)

    def tokenize(
        self,
        model: str,
        text: str,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[TokenizeParams],
    ) -> Job[TokenizeResult]:
        """Submit a text to convert into token ids; raises as `generate`."""
        return self._submit(TASK_TOKENIZE, model, text, wait, idempotency_key, params)

    def detokenize(
        self,
        model: str,
        tokens: list[int],
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[DetokenizeParams],
    ) -> Job[DetokenizeResult]:
        """Submit token ids to convert into text; raises as `generate`."""
        return self._submit(TASK_DETOKENIZE, model, tokens, wait, idempotency_key, params)

    def apply_chat_template(
        self,
        model: str,
        messages: Messages,
        *,
        wait: bool = False,
        idempotency_key: str | None = None,
        **params: Unpack[TemplateParams],
    ) -> Job[TemplateResult]:
        """Submit a conversation to convert into its prompt; raises as `generate`."""
        return self._submit(TASK_APPLY_CHAT_TEMPLATE, model, messages, wait, idempotency_key, params)

    def _submit(
        self, name: str, model: str, content: Any, wait: bool, key: str | None, params: Mapping[str, Any]
    ) -> Job[Any]:
        task = self._app.tasks[name]
        task.parse((model, content), params)  # mistakes of the caller are reported even if Redis is away
        with reaching_redis(self._url):
            if not wait:
                self._check_served(model)
            return Job(self, task.apply_async((model, content), dict(params), idempotency_key=key).id)

    def _submit_many(
        self,
        name: str,
        model: str,
        contents: Iterable[Any],
        wait: bool,
        keys: Sequence[str] | None,
        params: Mapping[str, Any],
    ) -> list[Job[Any]]:
        task = self._app.tasks[name]
        jobs = task.check_many([((model, content), dict(params)) for content in contents], keys)
        with reaching_redis(self._url):
            if not wait:
                self._check_served(model)
            return [Job(self, job_id) for job_id in task.queue_many(jobs)]

    def _check_served(self, model: str) -> None:
        served = [m["id"] for worker in live_workers(self._redis) for m in worker.models if m["status"] == "ready"]
        if model in served or (model == DEFAULT_MODEL and served):
            return
        if not served:
            raise UnknownModel(
                f"no worker is running, so none serves {model!r}; start one with `cellama up` or `cellama worker`, "
                "or pass wait=True to queue the job all the same"
            )
        close = difflib.get_close_matches(model, served, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"served: {', '.join(sorted(set(served)))}"
        raise UnknownModel(f"no live worker serves a model {model!r}; {hint}")

    def job(self, job_id: str) -> Job[Result]:
        """Return a job that was submitted elsewhere, for instance with `generate.delay(…).id`. Its methods raise
        UnknownJob if there is no such job."""
        return Job(self, job_id)

    def batch(
        self,
        input: str | Path,
        output: str | Path,
        *,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        **options: Unpack[BatchParams],
    ) -> Summary:
        """Run every line of a file as `cellama batch run` does. The same call resumes a run that was interrupted.

        `options` are those of the command: model, ordered, errors, format, column, id_column, form, deadline_s,
        merge_identical, retry_failed, overwrite; all others are parameters for lines that do not say otherwise. Raises
        InvalidJob, OSError; what was finished is kept.
        """
        with reaching_redis(self._url):
            self._redis.ping()
        return run_batch(self._redis, self._app, BatchOptions.of(input, output, **options), on_progress=on_progress)

    # Jobs

    def stream(
        self,
        job_id: str,
        after: int = -1,
        timeout: float = STREAM_TIMEOUT_S,
        *,
        ping: float = math.inf,
        cancel_on_exit: bool = False,
    ) -> Iterator[Event]:
        """Yield the job's events with a `seq` above `after`: first those that were published, then live ones, up to the
        terminal event.

        The stream resumes by itself when Redis was away for less than 15 s. After each `ping` seconds without an event
        it yields one of type `ping`. Leaving the loop does not cancel the job, unless `cancel_on_exit` is set.
        On a finished job an `after` that is the last `seq`, or above it, ends the stream at once without an event.
        Raises InvalidJob when `after` is not a seq, JobTimeout when nothing comes for `timeout` seconds, StreamTrimmed
        when events are gone, UnknownJob.
        """
        return self._stream(EventCursor(job_id, after), timeout, ping, cancel_on_exit)

    def _stream(self, cursor: EventCursor, timeout_s: float, ping_s: float, cancel_on_exit: bool) -> Iterator[Event]:
        outage = Outage(self._url)
        try:
            while not cursor.ended:
                with outage.watching():
                    for event in stream_events(
                        self._redis, cursor.job_id, timeout_s=timeout_s, ping_s=ping_s, cursor=cursor
                    ):
                        outage.is_over()
                        yield event
                if not cursor.ended:
                    time.sleep(OUTAGE_RETRY_S)
        finally:
            if cancel_on_exit and not cursor.ended:
                self.cancel(cursor.job_id)

    def result(self, job_id: str, timeout: float | None = None) -> Result:
        """Return the result of any job (see Job.result)."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with reaching_redis(self._url):
            self._check_kept(job_id)
            while True:
                remaining_s = max(0.0, deadline - time.monotonic())
                try:
                    asked = AsyncResult(job_id, app=self._app)
                    asked.ready()  # then Celery has no need to subscribe
                    result: Result = asked.get(timeout=min(RESULT_POLL_S, remaining_s), interval=0.05)
                    return result
                except CeleryTimeoutError:
                    if remaining_s <= RESULT_POLL_S:
                        raise result_timeout(job_id, timeout) from None
                except TaskRevokedError:
                    raise JobCancelled(f"job {job_id} was cancelled") from None

    def _check_kept(self, job_id: str) -> None:
        if self._redis.hexists(job_key(job_id), IGNORED_FIELD):
            raise ResultIgnored(
                f"job {job_id} was queued with ignore_result, so its result is not stored; read its stream"
            )

    def cancel(self, job_id: str) -> None:
        """Cancel any job wherever it is. Idempotent; an unknown or finished job is left alone."""
        with reaching_redis(self._url):
            self._app.control.revoke(job_id, terminate=True)

    def position(self, job_id: str) -> Position:
        """Return whether a job waits, runs or is done, how many jobs are before it, and an estimate.

        Raises UnknownJob.
        """
        with reaching_redis(self._url):
            return position_of(self._redis, job_id)

    def jobs(self, model: str | None = None, *, limit: int = 1000) -> list[OpenJob]:
        """Return the jobs that run or wait, of one model or all, whether a worker serves it or not."""
        with reaching_redis(self._url):
            return open_jobs(self._redis, model, limit)

    def purge(self, model: str) -> int:
        """Cancel all jobs that wait for a model, and return their number. Raises UnknownModel."""
        with reaching_redis(self._url):
            known = (*queues(live_workers(self._redis), queued_models(self._redis)), DEFAULT_MODEL)
            if model not in known and not any(self._queue_depths([model]).values()):
                waited_for = ", ".join(queued_models(self._redis)) or "none"
                raise UnknownModel(
                    f"no worker serves a model {model!r}, and no job waits for it; jobs wait for: {waited_for}"
                )
            return purge_queue(self._app, queue_name(model))

    def dead(self) -> list[DeadJob]:
        """Return the jobs that were put aside because their workers died again and again, the last one first."""
        with reaching_redis(self._url):
            return Ledger(self._redis).dead()

    def requeue_dead(self, job_id: str) -> Job[Result]:
        """Queue a dead job again, as a new job. Raises UnknownJob."""
        with reaching_redis(self._url):
            new_id = Ledger(self._redis).requeue_dead(job_id)
        if new_id is None:
            raise UnknownJob(f"no dead job {job_id}; `cellama dead list` shows those that there are")
        return Job(self, new_id)

    # Workers and their models

    def workers(self) -> list[WorkerEntry]:
        """Return the live workers."""
        with reaching_redis(self._url):
            return live_workers(self._redis)

    def models(self) -> list[ModelView]:
        """Return the models that live workers serve."""
        return models_of(self.workers())

    def memory(self, worker: str | None = None) -> list[MemoryView]:
        """Return for each worker its memory budget, the devices' total and free bytes, and what each model takes.

        Raises UnknownWorker.
        """
        return memory_of(self.workers(), worker)

    def stats(self) -> Stats:
        """Return slots, rate and waiting jobs over all workers."""
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
        """Load a model on every worker, or those of a pool, and on those that join it later; or on one worker.

        Returns its id once it takes jobs. Without a `model_id` it gets one from the name of its file, which no live
        worker has. `models()` lists the workers that could not load it, and why. `options` are those of a `[[models]]`
        table. Raises UnknownWorker, JobTimeout, JobFailed (the error of a worker, if none could load the model).
        """
        if model_id is None:
            workers = self.workers()
            taken = {thing["model"] for entry in workers for thing in entry.wanted}
            taken |= {loaded["id"] for entry in workers for loaded in entry.models}
            model_id = id_of_source(source, taken)
        model = {"id": model_id, "source": source, "default": default, **options}
        begun = self._commands.send("cellama_load", {"model": model}, Whom(worker, pool))
        self._commands.wait_for_status(begun, model_id, _status_of_model(model_id), "ready", timeout)
        return model_id

    def unload_model(
        self, model_id: str, *, worker: str | None = None, pool: str | None = None, timeout: float = UNLOAD_TIMEOUT_S
    ) -> None:
        """Unload a model after its running jobs have ended.

        Raises as `load_model` if no worker could unload it; the model serves on then. If some could, the others retry.
        """
        arguments = {"model_id": model_id, "timeout_s": timeout}
        begun = self._commands.send("cellama_unload", arguments, Whom(worker, pool))
        self._commands.wait_for_status(begun, model_id, _status_of_model(model_id), None, timeout + REPLY_S)

    def set_default_model(self, model_id: str, *, worker: str | None = None, pool: str | None = None) -> None:
        """Serve `:default` from this model. Raises UnknownWorker, JobFailed."""
        self._commands.send("cellama_default", {"model_id": model_id}, Whom(worker, pool))

    # LoRA adapters: each method acts on every worker that has the model, or on those of a pool, also on those that join
    # it later; or on one worker.

    def adapters(self, model_id: str) -> list[AdapterView]:
        """Return a model's adapters on all live workers.

        A name is listed more than once if workers have different files or scales. Raises UnknownModel.
        """
        workers = self.workers()
        known = {model["id"] for worker in workers for model in worker.models}
        if model_id not in known:
            raise UnknownModel(
                f"no live worker has a model {model_id!r}; there are: {', '.join(sorted(known)) or 'none'}"
            )
        found: dict[tuple[str, str, float, str], AdapterView] = {}
        for worker in workers:
            for adapter in _adapters_of(worker, model_id):
                kind = (adapter["name"], adapter["fingerprint"], adapter["scale"], adapter["status"])
                entry = found.setdefault(kind, {**adapter, "in_use": 0, "workers": []})
                entry["in_use"] += adapter["in_use"]
                entry["workers"].append(worker.name)
        return [found[kind] for kind in sorted(found)]

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
        """Load a LoRA adapter, and return once jobs can use it. `models()` lists the workers that could not load it.

        Jobs that do not choose adapters use it with this scale from then on; with 0, only jobs that ask for it do.
        Raises UnknownModel, UnknownWorker, JobTimeout, JobFailed (the error of a worker, if none could load it).
        """
        arguments = {"model_id": model_id, "name": name, "source": source, "scale": scale}
        begun = self._commands.send("cellama_load_adapter", arguments, Whom(worker, pool), model_id)
        status = _status_of_adapter(model_id, name)
        self._commands.wait_for_status(begun, failure_key(model_id, name), status, "ready", timeout)

    def set_adapter_scale(
        self, model_id: str, name: str, scale: float, *, worker: str | None = None, pool: str | None = None
    ) -> None:
        """Use the adapter with this scale in jobs that do not choose adapters. Raises as `load_adapter`."""
        arguments = {"model_id": model_id, "name": name, "scale": scale}
        self._commands.send("cellama_scale_adapter", arguments, Whom(worker, pool), model_id)

    def unload_adapter(
        self,
        model_id: str,
        name: str,
        *,
        worker: str | None = None,
        pool: str | None = None,
        timeout: float = ADAPTER_UNLOAD_TIMEOUT_S,
    ) -> None:
        """Unload an adapter after the jobs that use it.

        Raises as `load_adapter` if no worker could unload it; it stays in use then. If some could, the others retry.
        """
        arguments = {"model_id": model_id, "name": name, "timeout_s": timeout}
        begun = self._commands.send("cellama_unload_adapter", arguments, Whom(worker, pool), model_id)
        status = _status_of_adapter(model_id, name)
        self._commands.wait_for_status(begun, failure_key(model_id, name), status, None, timeout + REPLY_S)

    # KV caches of models on running workers

    def cached_prefix(
        self, model: str, prompt: Prompt | None = None, *, worker: str | None = None, **params: Unpack[PrefillParams]
    ) -> list[CachedPrefix]:
        """Return how much of a prompt, or of the `messages` of a chat, each worker has in its cache, and in which tier.
        The worker that has most comes first. The call waits for no engine and changes nothing.

        `params` are those of `prefill`, except `parent_key`. Texts have at most 100,000 characters here; pass longer
        ones as token ids. Raises InvalidJob, UnknownModel, UnknownWorker, JobFailed.
        """
        parse_job(KINDS[TASK_PREFILL].payload, (), (), {"model": model, "prompt": prompt, **params})
        model_id = None if model == DEFAULT_MODEL else model
        answers = self._commands.ask(
            "cellama_cached_prefix", {"job": {"model": model, "prompt": prompt, **params}}, Whom(worker), model_id
        )
        found = [cast(CachedPrefix, {"worker": name, **answer["ok"]}) for name, answer in answers.items()]
        return sorted(found, key=lambda prefix: (-prefix["cached_tokens"], prefix["worker"]))

    def last_cache_hit(self, model_id: str) -> dict[str, CacheHit | None]:
        """Return by worker how much of its prompt the last job that got a slot of the model found in the cache; None
        before the first job. The values are those of the last heartbeats. Raises UnknownModel."""
        found = {w.name: m.get("last_cache_hit") for w in self.workers() for m in w.models if m["id"] == model_id}
        if not found:
            raise UnknownModel(f"no live worker has a model {model_id!r}; `cellama models list` shows what there is")
        return found

    def evict(
        self, model_id: str, *, worker: str | None = None, pool: str | None = None, timeout: float = EVICT_TIMEOUT_S
    ) -> None:
        """Empty the model's idle slots and its RAM tier. With a `cache_dir`, states worth keeping are on disk then.
        The model stays loaded, and jobs continue. Raises UnknownModel, UnknownWorker, JobTimeout, JobFailed."""
        begun = self._commands.send("cellama_evict", {"model_id": model_id}, Whom(worker, pool), model_id)

        def status(entry: WorkerEntry) -> str | None:
            return "evicted" if entry.evicted.get(model_id, 0.0) >= begun.get(entry.name, 0.0) else None

        self._commands.wait_for_status(begun, evicting_key(model_id), status, "evicted", timeout)

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Outage:
    """Lets a reader wait for a Redis that comes back within OUTAGE_S. Raises RedisUnreachable if it does not."""

    def __init__(self, url: str | None = None) -> None:
        self._url = url
        self._since: float | None = None

    def is_over(self) -> None:
        self._since = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        try:
            with reaching_redis(self._url):
                yield
        except RedisUnreachable:
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since > OUTAGE_S:
                raise


def has_result(client: Client, job_id: str) -> bool:
    """Return whether Celery has the result of a job. Raises ResultIgnored, as Client.result."""
    with reaching_redis(client._url):
        client._check_kept(job_id)
        return bool(AsyncResult(job_id, app=client._app).ready())


def result_timeout(job_id: str, timeout_s: float | None) -> JobTimeout:
    return JobTimeout(f"job {job_id} has no result after {timeout_s} s; it continues: ask again, or cancel it")


def _status_of_model(model_id: str) -> Callable[[WorkerEntry], str | None]:
    return lambda worker: next((str(m["status"]) for m in worker.models if m["id"] == model_id), None)


def _status_of_adapter(model_id: str, name: str) -> Callable[[WorkerEntry], str | None]:
    return lambda worker: next((str(a["status"]) for a in _adapters_of(worker, model_id) if a["name"] == name), None)


def _adapters_of(worker: WorkerEntry, model_id: str) -> list[WorkerAdapter]:
    return [adapter for m in worker.models if m["id"] == model_id for adapter in m.get("adapters", [])]

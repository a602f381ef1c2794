"""Submits, watches and cancels jobs. `Client` blocks, `AsyncClient` is for asyncio; they share everything else."""

from __future__ import annotations

import asyncio
import difflib
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import redis
from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult
from redis.asyncio import Redis as AsyncRedis

from cellama.config import get_settings
from cellama.tasks import app, chat, embed, generate
from cellama.tasks.contract.errors import JobCancelled, JobTimeout, UnknownModel
from cellama.tasks.contract.events import Event
from cellama.tasks.contract.keys import cancel_key
from cellama.tasks.contract.names import DEFAULT_MODEL, queue_keys
from cellama.tasks.ledger import UNENDED_TTL_S
from cellama.tasks.reaching import reaching_redis
from cellama.tasks.reader import STREAM_TIMEOUT_S, astream_events, stream_events
from cellama.tasks.registry import WorkerEntry, live_workers

CONNECT_TIMEOUT_S = 3.0
RESULT_AFTER_END_S = 30.0  # the result is stored right after the terminal event


class _Core:
    """What both clients do, blocking. Redis is that of the settings."""

    def __init__(self) -> None:
        self._redis = redis.Redis.from_url(get_settings().redis_url, socket_connect_timeout=CONNECT_TIMEOUT_S)

    def submit(self, task: Any, model: str, content: Any, wait: bool, params: dict[str, Any]) -> AsyncResult:
        task.parse((model, content), params)  # the caller's mistakes first, then the world's
        with reaching_redis():
            self._redis.ping()  # Celery itself would retry for a long time
            if not wait:
                self._check_served(model)
            return task.apply_async((model, content), params)

    def _check_served(self, model: str) -> None:
        served = [entry["id"] for worker in live_workers(self._redis) for entry in worker.models]
        if model in served or (model == DEFAULT_MODEL and served):
            return
        if not served:
            raise UnknownModel(
                f"no worker is running, so nobody serves {model!r}; start one with `cellama up` or `cellama worker`, "
                "or pass wait=True to queue the job all the same"
            )
        close = difflib.get_close_matches(model, served, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"served: {', '.join(sorted(set(served)))}"
        raise UnknownModel(f"no live worker serves a model {model!r}; {hint}")

    def result(self, job_id: str, timeout_s: float | None) -> dict[str, Any]:
        with reaching_redis():
            try:
                result: dict[str, Any] = AsyncResult(job_id, app=app).get(timeout=timeout_s, interval=0.05)
                return result
            except CeleryTimeoutError:
                raise self.too_late(job_id, timeout_s) from None
            except TaskRevokedError:
                raise JobCancelled(f"job {job_id} was cancelled") from None

    @staticmethod
    def too_late(job_id: str, timeout_s: float | None) -> JobTimeout:
        return JobTimeout(f"job {job_id} has no result after {timeout_s} s; it goes on: ask again, or cancel it")

    def is_ready(self, job_id: str) -> bool:
        with reaching_redis():
            return bool(AsyncResult(job_id, app=app).ready())

    def cancel(self, job_id: str) -> None:
        with reaching_redis():
            # The key holds for workers that start later, the broadcast is for those that run it now.
            self._redis.set(cancel_key(job_id), "1", ex=UNENDED_TTL_S)
            app.control.revoke(job_id, terminate=True)

    def stream(self, job_id: str, after: int, timeout_s: float) -> Iterator[Event]:
        with reaching_redis():
            yield from stream_events(self._redis, job_id, after, timeout_s)

    def workers(self) -> list[WorkerEntry]:
        with reaching_redis():
            return live_workers(self._redis)

    def queue_depths(self, models: list[str]) -> dict[str, int]:
        with reaching_redis():
            pipeline = self._redis.pipeline(transaction=False)
            for model in models:
                for key in queue_keys(model):
                    pipeline.llen(key)
            lengths = iter(pipeline.execute())
            return {model: sum(next(lengths) for _ in queue_keys(model)) for model in models}

    def close(self) -> None:
        self._redis.close()


def _models(workers: list[WorkerEntry]) -> list[dict[str, Any]]:
    """Each served model once, with the names of its workers."""
    models: dict[str, dict[str, Any]] = {}
    for worker in workers:
        for entry in worker.models:
            described = {k: v for k, v in entry.items() if k != "engine"}
            models.setdefault(entry["id"], {**described, "workers": []})["workers"].append(worker.name)
    return [models[model_id] for model_id in sorted(models)]


def _stats(workers: list[WorkerEntry], depths: dict[str, int]) -> dict[str, Any]:
    """Totals over all workers, and the jobs that wait per model."""
    engines = [entry["engine"] for worker in workers for entry in worker.models if entry["engine"]]
    return {
        "workers": len(workers),
        "slots_total": sum(engine["slots_total"] for engine in engines),
        "slots_busy": sum(engine["slots_prefilling"] + engine["slots_decoding"] for engine in engines),
        "generation_rate": round(sum(engine["generation_rate"] for engine in engines), 1),
        "queues": depths,
    }


def _queues(workers: list[WorkerEntry]) -> list[str]:
    return [*sorted({entry["id"] for worker in workers for entry in worker.models}), DEFAULT_MODEL]


class Job:
    """A submitted job."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.id = job_id
        self._client = client

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """The result. Raises JobFailed, JobCancelled, or JobTimeout after `timeout` seconds (the job goes on)."""
        return self._client.result(self.id, timeout)

    def stream(self, after: int = -1, timeout: float = STREAM_TIMEOUT_S) -> Iterator[Event]:
        """Its events (see Client.stream)."""
        return self._client.stream(self.id, after, timeout)

    def cancel(self) -> None:
        """Ends the job wherever it is; its slot is free within one step."""
        self._client.cancel(self.id)


class Client:
    """Talks to the workers through Redis. Threads may share one.

    Every method raises RedisUnreachable when Redis does not answer.
    """

    def __init__(self) -> None:
        self._core = _Core()

    def generate(self, model: str, prompt: str | list[int], *, wait: bool = False, **params: Any) -> Job:
        """Submits a generation. Raises InvalidJob, and UnknownModel if nobody serves the model (unless `wait`)."""
        return Job(self, self._core.submit(generate, model, prompt, wait, params).id)

    def chat(self, model: str, messages: list[dict[str, str]], *, wait: bool = False, **params: Any) -> Job:
        """Submits a chat turn; raises as `generate`."""
        return Job(self, self._core.submit(chat, model, messages, wait, params).id)

    def embed(self, model: str, texts: str | list[str], *, wait: bool = False, **params: Any) -> Job:
        """Submits texts to embed; raises as `generate`."""
        return Job(self, self._core.submit(embed, model, texts, wait, params).id)

    def stream(self, job_id: str, after: int = -1, timeout: float = STREAM_TIMEOUT_S) -> Iterator[Event]:
        """The job's events with a `seq` above `after`: replayed, then live, to the terminal one.

        Raises JobTimeout when nothing comes for `timeout` seconds, StreamTrimmed when events are gone.
        Leaving the loop does not cancel the job.
        """
        return self._core.stream(job_id, after, timeout)

    def result(self, job_id: str, timeout: float | None = None) -> dict[str, Any]:
        """The result of any job (see Job.result)."""
        return self._core.result(job_id, timeout)

    def cancel(self, job_id: str) -> None:
        """Ends any job wherever it is. Idempotent; an unknown or finished job is left alone."""
        self._core.cancel(job_id)

    def workers(self) -> list[WorkerEntry]:
        """The live workers."""
        return self._core.workers()

    def models(self) -> list[dict[str, Any]]:
        """The models that live workers serve."""
        return _models(self._core.workers())

    def stats(self) -> dict[str, Any]:
        """Slots, rate and waiting jobs over all workers."""
        workers = self._core.workers()
        return _stats(workers, self._core.queue_depths(_queues(workers)))

    def close(self) -> None:
        """Gives the connections back."""
        self._core.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncJob:
    """A submitted job, for asyncio (see Job)."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self.id = job_id
        self._client = client

    async def result(self, timeout: float | None = None) -> dict[str, Any]:
        return await self._client.result(self.id, timeout)

    def stream(self, after: int = -1, timeout: float = STREAM_TIMEOUT_S) -> AsyncIterator[Event]:
        return self._client.stream(self.id, after, timeout)

    async def cancel(self) -> None:
        await self._client.cancel(self.id)


class AsyncClient:
    """The Client for asyncio: same methods, same errors. Short blocking calls run in threads, streams don't."""

    def __init__(self) -> None:
        self._core = _Core()
        self._redis = AsyncRedis.from_url(get_settings().redis_url, socket_connect_timeout=CONNECT_TIMEOUT_S)

    async def _submit(self, task: Any, model: str, content: Any, wait: bool, params: dict[str, Any]) -> AsyncJob:
        result = await asyncio.to_thread(self._core.submit, task, model, content, wait, params)
        return AsyncJob(self, result.id)

    async def generate(self, model: str, prompt: str | list[int], *, wait: bool = False, **params: Any) -> AsyncJob:
        return await self._submit(generate, model, prompt, wait, params)

    async def chat(self, model: str, messages: list[dict[str, str]], *, wait: bool = False, **params: Any) -> AsyncJob:
        return await self._submit(chat, model, messages, wait, params)

    async def embed(self, model: str, texts: str | list[str], *, wait: bool = False, **params: Any) -> AsyncJob:
        return await self._submit(embed, model, texts, wait, params)

    async def stream(self, job_id: str, after: int = -1, timeout: float = STREAM_TIMEOUT_S) -> AsyncIterator[Event]:
        with reaching_redis():
            async for event in astream_events(self._redis, job_id, after, timeout):
                yield event

    async def result(self, job_id: str, timeout: float | None = None) -> dict[str, Any]:
        """The result. It follows the stream to its end first, so that no thread is held meanwhile."""
        if not await asyncio.to_thread(self._core.is_ready, job_id):
            try:
                async with asyncio.timeout(timeout):
                    async for _ in self.stream(job_id, timeout=math.inf):
                        pass
            except TimeoutError:
                raise self._core.too_late(job_id, timeout) from None
        return await asyncio.to_thread(self._core.result, job_id, RESULT_AFTER_END_S)

    async def cancel(self, job_id: str) -> None:
        await asyncio.to_thread(self._core.cancel, job_id)

    async def workers(self) -> list[WorkerEntry]:
        return await asyncio.to_thread(self._core.workers)

    async def models(self) -> list[dict[str, Any]]:
        return _models(await self.workers())

    async def stats(self) -> dict[str, Any]:
        workers = await self.workers()
        return _stats(workers, await asyncio.to_thread(self._core.queue_depths, _queues(workers)))

    async def close(self) -> None:
        await self._redis.aclose()
        self._core.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

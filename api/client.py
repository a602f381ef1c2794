"""Submits, watches and cancels jobs. `Client` blocks, `AsyncClient` is for asyncio; they share everything else."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import redis
from celery.exceptions import TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult
from redis.asyncio import Redis as AsyncRedis

from cellama.config import get_settings
from cellama.tasks import app, chat, embed, generate
from cellama.tasks.contract.errors import JobCancelled, JobTimeout, RedisUnreachable, UnknownJob, UnknownModel
from cellama.tasks.contract.events import Event, is_terminal
from cellama.tasks.contract.names import DEFAULT_MODEL, queue_keys, queue_name
from cellama.tasks.ledger import Ledger
from cellama.tasks.position import Position, estimate_s, position_of
from cellama.tasks.reaching import reaching_redis
from cellama.tasks.reader import STREAM_TIMEOUT_S, astream_events, stream_events
from cellama.tasks.registry import WorkerEntry, live_workers

CONNECT_TIMEOUT_S = 3.0
OUTAGE_S = 15.0  # a reader waits so long for Redis to come back
OUTAGE_RETRY_S = 0.5
RESULT_AFTER_END_S = 30.0  # the result is stored right after the terminal event


class _Core:
    """What both clients do, blocking. Redis is that of the settings."""

    def __init__(self) -> None:
        self._redis = redis.Redis.from_url(get_settings().redis_url, socket_connect_timeout=CONNECT_TIMEOUT_S)

    def submit(self, task: Any, model: str, content: Any, wait: bool, params: dict[str, Any]) -> AsyncResult:
        key = params.pop("idempotency_key", None)
        task.parse((model, content), params)  # the caller's mistakes first, then the world's
        with reaching_redis():
            self._redis.ping()  # Celery itself would retry for a long time
            if not wait:
                self._check_served(model)
            return task.apply_async((model, content), params, idempotency_key=key)

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
            app.control.revoke(job_id, terminate=True)

    def stream(self, job_id: str, after: int, timeout_s: float, ping_s: float, cancel_on_exit: bool) -> Iterator[Event]:
        outage, ended = _Outage(), False
        try:
            while not ended:
                with outage.watching():
                    for event in stream_events(self._redis, job_id, after, timeout_s, ping_s):
                        outage.is_over()
                        after = event.get("seq", after)
                        ended = is_terminal(event)
                        yield event
                if not ended:
                    time.sleep(OUTAGE_RETRY_S)
        finally:
            if cancel_on_exit and not ended:
                self.cancel(job_id)

    def position(self, job_id: str) -> Position:
        with reaching_redis():
            return position_of(self._redis, job_id)

    def dead(self) -> list[dict[str, Any]]:
        with reaching_redis():
            return Ledger(self._redis).dead()

    def requeue_dead(self, job_id: str) -> str:
        with reaching_redis():
            call = Ledger(self._redis).take_dead(job_id)
            if call is None:
                raise UnknownJob(f"no dead job {job_id}; `cellama dead list` shows those that there are")
            task = app.tasks[call["task"]]
            return str(
                task.apply_async(call["args"], call["kwargs"], queue=call["queue"], priority=call["priority"]).id
            )

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

    def num_waiting(self, models: list[str]) -> dict[str, int]:
        with reaching_redis():
            return {model: Ledger(self._redis).num_waiting(queue_name(model)) for model in models}

    def stats(self) -> dict[str, Any]:
        workers = self.workers()
        models = _queues(workers)
        return _stats(workers, self.queue_depths(models), self.num_waiting(models))

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


def _stats(workers: list[WorkerEntry], depths: dict[str, int], waiting: dict[str, int]) -> dict[str, Any]:
    """Totals over all workers; per model the messages in its queue, the jobs without a slot, and when a new one's
    turn would come."""
    engines = [entry["engine"] for worker in workers for entry in worker.models if entry["engine"]]
    return {
        "workers": len(workers),
        "slots_total": sum(engine["slots_total"] for engine in engines),
        "slots_busy": sum(engine["slots_prefilling"] + engine["slots_decoding"] for engine in engines),
        "generation_rate": round(sum(engine["generation_rate"] for engine in engines), 1),
        "queues": depths,
        "waiting": waiting,
        "eta_s": {model: estimate_s(workers, queue_name(model), count) for model, count in waiting.items()},
    }


def _queues(workers: list[WorkerEntry]) -> list[str]:
    return [*sorted({entry["id"] for worker in workers for entry in worker.models}), DEFAULT_MODEL]


class _Outage:
    """Lets a reader wait for a Redis that comes back soon. Raises RedisUnreachable when it does not."""

    def __init__(self) -> None:
        self._since: float | None = None

    def is_over(self) -> None:
        self._since = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        try:
            with reaching_redis():
                yield
        except RedisUnreachable:
            self._since = self._since or time.monotonic()
            if time.monotonic() - self._since > OUTAGE_S:
                raise


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


class Client:
    """Talks to the workers through Redis. Threads may share one.

    Every method raises RedisUnreachable when Redis does not answer.
    """

    def __init__(self) -> None:
        self._core = _Core()

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
        return _models(self._core.workers())

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


class AsyncJob:
    """A submitted job, for asyncio (see Job)."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self.id = job_id
        self._client = client

    async def result(self, timeout: float | None = None) -> dict[str, Any]:
        return await self._client.result(self.id, timeout)

    def stream(
        self,
        after: int = -1,
        timeout: float = STREAM_TIMEOUT_S,
        *,
        ping: float = math.inf,
        cancel_on_exit: bool = False,
    ) -> AsyncIterator[Event]:
        return self._client.stream(self.id, after, timeout, ping=ping, cancel_on_exit=cancel_on_exit)

    async def position(self) -> Position:
        return await self._client.position(self.id)

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

    async def stream(
        self,
        job_id: str,
        after: int = -1,
        timeout: float = STREAM_TIMEOUT_S,
        *,
        ping: float = math.inf,
        cancel_on_exit: bool = False,
    ) -> AsyncIterator[Event]:
        outage, ended = _Outage(), False
        try:
            while not ended:
                with outage.watching():
                    async for event in astream_events(self._redis, job_id, after, timeout, ping):
                        outage.is_over()
                        after = event.get("seq", after)
                        ended = is_terminal(event)
                        yield event
                if not ended:
                    await asyncio.sleep(OUTAGE_RETRY_S)
        finally:
            if cancel_on_exit and not ended:
                await self.cancel(job_id)

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

    async def position(self, job_id: str) -> Position:
        return await asyncio.to_thread(self._core.position, job_id)

    async def dead(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._core.dead)

    async def requeue_dead(self, job_id: str) -> AsyncJob:
        return AsyncJob(self, await asyncio.to_thread(self._core.requeue_dead, job_id))

    async def workers(self) -> list[WorkerEntry]:
        return await asyncio.to_thread(self._core.workers)

    async def models(self) -> list[dict[str, Any]]:
        return _models(await self.workers())

    async def stats(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._core.stats)

    async def close(self) -> None:
        await self._redis.aclose()
        self._core.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

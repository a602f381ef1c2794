"""The client for asyncio: as `Client`, which documents what its methods do."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from cellama.api.batch.options import BatchOptions, Summary
from cellama.api.batch.progress import Progress
from cellama.tasks import apply_chat_template, chat, detokenize, embed, generate, rerank, tokenize
from cellama.tasks.connection.connections import connect_async
from cellama.tasks.contract.events import Event, is_terminal
from cellama.tasks.state.job_list import OpenJob
from cellama.tasks.state.position import Position
from cellama.tasks.state.reader import STREAM_TIMEOUT_S, EventCursor, astream_events
from cellama.tasks.state.registry import WorkerEntry

from .adapters import AsyncAdapterControl
from .client import LOAD_TIMEOUT_S, RESULT_AFTER_END_S, UNLOAD_TIMEOUT_S
from .core import CONNECT_TIMEOUT_S, Core
from .outage import OUTAGE_RETRY_S, Outage
from .registry_views import memory_of, models_of


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


class _Stopped(Exception):
    """Ends a bulk run whose caller was cancelled."""


class AsyncClient(AsyncAdapterControl):
    """The Client for asyncio: same methods, same errors. Short blocking calls run in threads, streams don't."""

    def __init__(self) -> None:
        self._core = Core()
        self._redis = connect_async(socket_connect_timeout=CONNECT_TIMEOUT_S)

    async def _submit(self, task: Any, model: str, content: Any, wait: bool, params: dict[str, Any]) -> AsyncJob:
        result = await asyncio.to_thread(self._core.submit, task, model, content, wait, params)
        return AsyncJob(self, result.id)

    async def generate(self, model: str, prompt: str | list[int], *, wait: bool = False, **params: Any) -> AsyncJob:
        return await self._submit(generate, model, prompt, wait, params)

    async def chat(self, model: str, messages: list[dict[str, str]], *, wait: bool = False, **params: Any) -> AsyncJob:
        return await self._submit(chat, model, messages, wait, params)

    async def embed(self, model: str, texts: str | list[str], *, wait: bool = False, **params: Any) -> AsyncJob:
        return await self._submit(embed, model, texts, wait, params)

    async def rerank(
        self, model: str, query: str, documents: str | list[str], *, wait: bool = False, **params: Any
    ) -> AsyncJob:
        return await self._submit(rerank, model, query, wait, {"documents": documents, **params})

    async def generate_many(
        self, model: str, prompts: Iterable[str | list[int]], *, wait: bool = False, **params: Any
    ) -> list[AsyncJob]:
        return await self._submit_many(generate, model, prompts, wait, params)

    async def chat_many(
        self, model: str, conversations: Iterable[list[dict[str, Any]]], *, wait: bool = False, **params: Any
    ) -> list[AsyncJob]:
        return await self._submit_many(chat, model, conversations, wait, params)

    async def embed_many(
        self, model: str, texts: Iterable[str | list[str]], *, wait: bool = False, **params: Any
    ) -> list[AsyncJob]:
        return await self._submit_many(embed, model, texts, wait, params)

    async def _submit_many(
        self, task: Any, model: str, contents: Iterable[Any], wait: bool, params: dict[str, Any]
    ) -> list[AsyncJob]:
        ids = await asyncio.to_thread(self._core.submit_many, task, model, contents, wait, params)
        return [AsyncJob(self, job_id) for job_id in ids]

    async def tokenize(self, model: str, text: str, *, wait: bool = False, **params: Any) -> AsyncJob:
        return await self._submit(tokenize, model, text, wait, params)

    async def detokenize(self, model: str, tokens: list[int], *, wait: bool = False, **params: Any) -> AsyncJob:
        return await self._submit(detokenize, model, tokens, wait, params)

    async def apply_chat_template(
        self, model: str, messages: list[dict[str, str]], *, wait: bool = False, **params: Any
    ) -> AsyncJob:
        return await self._submit(apply_chat_template, model, messages, wait, params)

    async def batch(
        self,
        input: str | Path,
        output: str | Path,
        *,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        **options: Any,
    ) -> Summary:
        """As Client.batch, in a thread of its own, which calls `on_progress`.

        When this is cancelled the run is interrupted: the same call goes on with it.
        """
        stopping = threading.Event()

        def watch(progress: Progress) -> None:
            if stopping.is_set():
                raise _Stopped
            on_progress(progress)

        run = asyncio.to_thread(self._core.batch, BatchOptions.of(input, output, **options), watch)
        running = asyncio.ensure_future(run)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stopping.set()
            with contextlib.suppress(_Stopped):
                await running
            raise

    async def stream(
        self,
        job_id: str,
        after: int = -1,
        timeout: float = STREAM_TIMEOUT_S,
        *,
        ping: float = math.inf,
        cancel_on_exit: bool = False,
    ) -> AsyncIterator[Event]:
        outage, cursor, ended = Outage(), EventCursor(job_id, after), False
        try:
            while not ended:
                with outage.watching():
                    async for event in astream_events(self._redis, job_id, after, timeout, ping, cursor):
                        outage.is_over()
                        ended = is_terminal(event)
                        yield event
                if not ended:
                    await asyncio.sleep(OUTAGE_RETRY_S)
        finally:
            if cancel_on_exit and not ended:
                await self._cancel_for_certain(job_id)

    async def _cancel_for_certain(self, job_id: str) -> None:
        """The job is cancelled, although the caller may be cancelled itself, again and again (a scope of anyio).

        The thread has the work at once; a task would not begin any more when its loop ends.
        """
        cancelling = asyncio.get_running_loop().run_in_executor(None, self._core.cancel, job_id)
        await asyncio.shield(cancelling)

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

    async def jobs(self, model: str | None = None, *, limit: int = 1000) -> list[OpenJob]:
        return await asyncio.to_thread(self._core.jobs, model, limit)

    async def purge(self, model: str) -> int:
        return await asyncio.to_thread(self._core.purge, model)

    async def dead(self) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._core.dead)

    async def requeue_dead(self, job_id: str) -> AsyncJob:
        return AsyncJob(self, await asyncio.to_thread(self._core.requeue_dead, job_id))

    async def workers(self) -> list[WorkerEntry]:
        return await asyncio.to_thread(self._core.workers)

    async def models(self) -> list[dict[str, Any]]:
        return models_of(await self.workers())

    async def memory(self, worker: str | None = None) -> list[dict[str, Any]]:
        return memory_of(await self.workers(), worker)

    async def load_model(
        self,
        model_id: str,
        source: str,
        *,
        worker: str | None = None,
        default: bool = False,
        timeout: float = LOAD_TIMEOUT_S,
        **options: Any,
    ) -> None:
        model = {"id": model_id, "source": source, "default": default, **options}
        await asyncio.to_thread(self._core.load_model, model, worker, timeout)

    async def unload_model(
        self, model_id: str, *, worker: str | None = None, timeout: float = UNLOAD_TIMEOUT_S
    ) -> None:
        await asyncio.to_thread(self._core.unload_model, model_id, worker, timeout)

    async def set_default_model(self, model_id: str, *, worker: str | None = None) -> None:
        await asyncio.to_thread(self._core.set_default_model, model_id, worker)

    async def stats(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._core.stats)

    async def close(self) -> None:
        await self._redis.aclose()
        self._core.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

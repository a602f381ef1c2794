"""The asyncio client, which has the same methods as `Client`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, cast, overload

from cellama.api.batch.frames import RowsInMemory
from cellama.api.batch.options import BatchParams, Progress, Summary
from cellama.api.batch.start import OnProgress
from cellama.tasks.connection.connections import CONNECT_TIMEOUT_S, connect_async
from cellama.tasks.contract.all_kinds import Result
from cellama.tasks.contract.events import Event
from cellama.tasks.estimates.position import Position
from cellama.tasks.live.streams import Streams
from cellama.tasks.state.reader import STREAM_TIMEOUT_S, EventCursor

from .client import (
    OUTAGE_RETRY_S,
    RESULT_POLL_S,
    RESULT_TIMEOUT_S,
    Client,
    FrameT,
    Job,
    Outage,
    R,
    has_result,
    result_timeout,
    unserved_wait,
)

P = ParamSpec("P")
T = TypeVar("T")


class AsyncJob(Generic[R]):
    """The asyncio handle of a submitted job. `R` is the type of the job's result."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self.id = job_id
        self._client = client

    async def result(self, timeout: float | None = None) -> R:
        """Wait for the result and return it, as `Job.result` does, but without blocking a thread."""
        return cast(R, await self._client.result(self.id, timeout))

    def stream(
        self,
        after: int = -1,
        timeout: float = STREAM_TIMEOUT_S,
        *,
        ping: float = math.inf,
        cancel_on_exit: bool = False,
    ) -> AsyncIterator[Event]:
        """Yield the job's events, as `Job.stream` does, but without blocking a thread."""
        return self._client.stream(self.id, after, timeout, ping=ping, cancel_on_exit=cancel_on_exit)

    async def position(self) -> Position:
        """Return whether the job is waiting, running or done, and how many jobs are ahead of it."""
        return await self._client.position(self.id)

    async def cancel(self) -> None:
        """Cancel the job, whether it is waiting or running."""
        await self._client.cancel(self.id)


def _in_thread(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[None, None, T]]:
    """Return a coroutine function that runs a method of `Client` in a thread."""

    @functools.wraps(method)
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self._client, *args, **kwargs)

    return call


def _submitting(
    method: Callable[Concatenate[Client, P], Job[R]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[None, None, AsyncJob[R]]]:
    """Return a coroutine function that runs a method of `Client` in a thread, and returns an `AsyncJob`."""

    @functools.wraps(method)
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncJob[R]:
        return AsyncJob(self, (await asyncio.to_thread(method, self._client, *args, **kwargs)).id)

    return call


def _submitting_many(
    method: Callable[Concatenate[Client, P], list[Job[R]]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[None, None, list[AsyncJob[R]]]]:
    """Return a coroutine function that runs a method of `Client` in a thread, and returns a list of `AsyncJob`."""

    @functools.wraps(method)
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> list[AsyncJob[R]]:
        return [AsyncJob(self, job.id) for job in await asyncio.to_thread(method, self._client, *args, **kwargs)]

    return call


class _Stopped(Exception):
    """Stops a bulk run whose caller was cancelled."""


class AsyncClient:
    """The asyncio client, which has the same methods as `Client` and raises the same errors.

    Short blocking calls run in threads, but streams don't. All streams in an event loop share two connections.
    """

    def __init__(self, url: str | None = None) -> None:
        """Create a client for the Redis server at `url`, as `Client` does."""
        self._client = Client(url)
        self._url = url
        self._streams: dict[asyncio.AbstractEventLoop, Streams] = {}

    generate = _submitting(Client.generate)
    chat = _submitting(Client.chat)
    prefill = _submitting(Client.prefill)
    embed = _submitting(Client.embed)
    rerank = _submitting(Client.rerank)
    tokenize = _submitting(Client.tokenize)
    detokenize = _submitting(Client.detokenize)
    apply_chat_template = _submitting(Client.apply_chat_template)
    requeue_dead = _submitting(Client.requeue_dead)
    generate_many = _submitting_many(Client.generate_many)
    chat_many = _submitting_many(Client.chat_many)
    embed_many = _submitting_many(Client.embed_many)
    cancel = _in_thread(Client.cancel)
    position = _in_thread(Client.position)
    jobs = _in_thread(Client.jobs)
    tenants = _in_thread(Client.tenants)
    purge = _in_thread(Client.purge)
    dead = _in_thread(Client.dead)
    workers = _in_thread(Client.workers)
    models = _in_thread(Client.models)
    memory = _in_thread(Client.memory)
    load_model = _in_thread(Client.load_model)
    unload_model = _in_thread(Client.unload_model)
    set_default_model = _in_thread(Client.set_default_model)
    stats = _in_thread(Client.stats)
    evict = _in_thread(Client.evict)
    cached_prefix = _in_thread(Client.cached_prefix)
    explain_cache = _in_thread(Client.explain_cache)
    last_cache_hit = _in_thread(Client.last_cache_hit)
    adapters = _in_thread(Client.adapters)
    load_adapter = _in_thread(Client.load_adapter)
    set_adapter_scale = _in_thread(Client.set_adapter_scale)
    unload_adapter = _in_thread(Client.unload_adapter)

    def job(self, job_id: str) -> AsyncJob[Result]:
        """Return the job with this id, as `Client.job` does."""
        return AsyncJob(self, job_id)

    @overload
    async def batch(  # type: ignore[overload-overlap]  # a str is a sequence of strings
        self, input: str | Path, output: str | Path, *, on_progress: OnProgress = ..., **options: Unpack[BatchParams]
    ) -> Summary: ...

    @overload
    async def batch(
        self,
        input: RowsInMemory,
        output: str | Path | None = None,
        *,
        on_progress: OnProgress = ...,
        **options: Unpack[BatchParams],
    ) -> list[dict[str, Any]]: ...

    @overload
    async def batch(
        self,
        input: FrameT,
        output: str | Path | None = None,
        *,
        on_progress: OnProgress = ...,
        **options: Unpack[BatchParams],
    ) -> FrameT: ...

    async def batch(
        self,
        input: object,
        output: str | Path | None = None,
        *,
        on_progress: OnProgress = lambda progress: None,
        **options: Unpack[BatchParams],
    ) -> object:
        """Run a batch as `Client.batch` does, but in another thread.

        The thread that executes the run also calls `on_progress`. Cancelling this coroutine interrupts the run. To
        resume the run, call the method again with the same arguments.
        """
        stopping = threading.Event()

        def watch(progress: Progress) -> None:
            if stopping.is_set():
                raise _Stopped
            on_progress(progress)

        call: Any = functools.partial(cast(Any, self._client).batch, input, output, on_progress=watch, **options)
        running: asyncio.Future[Any] = asyncio.ensure_future(asyncio.to_thread(call))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            stopping.set()
            with contextlib.suppress(_Stopped):
                await running
            raise

    def stream(
        self,
        job_id: str,
        after: int = -1,
        timeout: float = STREAM_TIMEOUT_S,
        *,
        ping: float = math.inf,
        cancel_on_exit: bool = False,
    ) -> AsyncIterator[Event]:
        """Yield a job's events, as `Client.stream` does.

        With `cancel_on_exit`, cancelling the caller's task also cancels the job.
        """
        return self._stream(EventCursor(job_id, after), timeout, ping, cancel_on_exit)

    async def _stream(
        self, cursor: EventCursor, timeout_s: float, ping_s: float, cancel_on_exit: bool
    ) -> AsyncIterator[Event]:
        outage = Outage(self._url)
        try:
            while not cursor.ended:
                with outage.tolerated():
                    async for event in self._loop_streams().events(
                        cursor.job_id, timeout_s=timeout_s, ping_s=ping_s, cursor=cursor
                    ):
                        outage.clear()
                        yield event
                if not cursor.ended:
                    await asyncio.sleep(OUTAGE_RETRY_S)
        finally:
            if cancel_on_exit and not cursor.ended:
                await self._cancel_shielded(cursor.job_id)

    def _loop_streams(self) -> Streams:
        """Return the object that reads all job streams of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._streams:
            for closed in [each for each in self._streams if each.is_closed()]:
                del self._streams[closed]
            self._streams[loop] = Streams(connect_async(self._url, socket_connect_timeout=CONNECT_TIMEOUT_S))
        return self._streams[loop]

    async def _cancel_shielded(self, job_id: str) -> None:
        """Cancel a job even if the caller is cancelled repeatedly, for example by an anyio cancel scope.

        The call runs in a thread because a new task would not start while the event loop is closing.
        """
        cancelling = asyncio.get_running_loop().run_in_executor(None, self._client.cancel, job_id)
        await asyncio.shield(cancelling)

    async def result(self, job_id: str, timeout: float | None = None) -> Result:
        """Wait for a job's result and return it.

        The method reads the job's stream while waiting, so no thread is blocked.
        """
        if not await asyncio.to_thread(has_result, self._client, job_id):
            unserved = unserved_wait(self._client)
            try:
                async with asyncio.timeout(timeout):
                    async for event in self.stream(job_id, timeout=math.inf, ping=RESULT_POLL_S):
                        if event["type"] == "ping" and unserved.is_due:
                            await asyncio.to_thread(unserved.check, [job_id])
            except TimeoutError:
                raise result_timeout(job_id, timeout) from None
        return await asyncio.to_thread(self._client.result, job_id, RESULT_TIMEOUT_S)

    async def close(self) -> None:
        """Close the connections. Streams that are still open in this event loop raise RuntimeError."""
        if (streams := self._streams.pop(asyncio.get_running_loop(), None)) is not None:
            await streams.close()
        self._client.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

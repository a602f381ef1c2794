"""The jobs of one request: from their submission to their ends, and what becomes of them when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from cellama.api.client.async_client import AsyncJob
from cellama.config.logging import logging_about
from cellama.tasks.contract.errors import InvalidJob, JobError, StreamTrimmed, UnknownJob
from cellama.tasks.contract.events import Event, is_terminal
from cellama.tasks.contract.shapes.results import Result
from cellama.tasks.traces.gate import trace_id_here

from .asking import Asked
from .callers import Admission, Unlimited
from .errors import ApiError, of_code, of_job
from .leaving import unless_gone
from .sse import EventStream
from .warning_header import warning_headers

log = logging.getLogger(__name__)

RESULT_S = 30.0  # the result is stored with the last event
CANCELLED_S = 10.0  # until a job that is cancelled has ended
BUFFERED = 4  # events of several jobs that wait for a slow reader

Placed = tuple[int, Event]


class Running:
    """One job, or one for each of several prompts. Those that have not ended when it is closed are cancelled, unless
    the request has an idempotency key: its client will ask again. To be used by `async with`."""

    def __init__(
        self,
        asked: Asked,
        model: str,
        tier: str,
        *,
        has_usage: bool = True,
        in_words: Callable[[ApiError], ApiError] = lambda error: error,
    ) -> None:
        """`model` is as the job names it. Jobs without usage are charged for the tokens that were estimated. `in_words`
        gives what a worker found wrong the names that the body has."""
        self.asked = asked
        self.model = model
        self.tier = tier
        self.jobs: list[AsyncJob[Any]] = []
        self.usages: dict[int, Any] = {}  # of the jobs that have ended
        self.is_kept = asked.idempotency_key is not None
        self._ended: set[int] = set()
        self._seen: dict[int, int] = {}  # of each job, the number of its last event
        self._admission: Admission = asked.visit.hand_over()
        self._has_usage = has_usage
        self._in_words = in_words
        self._is_streamed = self._is_closed = False

    @property
    def headers(self) -> dict[str, str]:
        return dict(self._admission.headers)

    def headers_for(self, answer: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers of an answer that comes all at once."""
        return {**self.headers, **warning_headers(answer)}

    async def admit(self, num_tokens: int, num_jobs: int = 1) -> None:
        """Raises ApiError: 403 for a model that is not the caller's, 429 if the caller's limits don't allow it."""
        self.asked.caller.check_model(self.model)
        await self._admission.reserve(num_tokens, num_jobs)

    async def submit(self, *calls: Callable[[str | None], Awaitable[AsyncJob[Any]]]) -> None:
        """Queues a job by each of these, which get its idempotency key. Raises ApiError."""
        key = self.asked.idempotency_key
        for place, call in enumerate(calls):
            own = key if key is None or len(calls) == 1 else f"{key} {place}"
            submitting = asyncio.ensure_future(call(own))
            try:
                self.jobs.append(await asyncio.shield(submitting))
            except asyncio.CancelledError:
                if not self.is_kept:
                    self.asked.gateway.afterwards(_cancel_when_there(submitting))
                raise
            except InvalidJob:
                raise  # who has mapped the body knows how its fields are called
            except JobError as error:
                raise await self.failed(of_job(error)) from None
        with logging_about("", trace_id_here()):
            log.info("request %s: job %s", self.asked.request.state.request_id, ", ".join(job.id for job in self.jobs))
        await self._check_wait()

    async def _check_wait(self) -> None:
        """Of a long queue each job is asked for its own place: bulk work does not hold up what is urgent."""
        gateway = self.asked.gateway
        limit = gateway.settings.gateway_max_wait_s
        if not limit or self.tier == "flex" or await gateway.directory.wait_s(self.model, self.tier) <= limit:
            return
        eta_s = (await self.jobs[0].position()).eta_s or 0.0
        if eta_s > limit:
            raise ApiError(
                429,
                f"about {eta_s:.0f} s would go by before its turn, and the limit is {limit} s; ask later, "
                "or with service_tier flex",
                code="queue_full",
                retry_after_s=eta_s - limit,
            )

    async def failed(self, error: ApiError) -> ApiError:
        """The error as the client gets it."""
        error = self._in_words(error)
        if error.code == "unknown_adapter" and self.asked.caller.adapters is not None:  # it names others' adapters
            error = ApiError(
                error.status, "the adapter is not loaded for this model", code=error.code, param="adapters"
            )
        return await self.asked.gateway.directory.with_wait(error, self.model, self.tier)

    async def events(self, ping_s: float = math.inf) -> AsyncGenerator[Placed, None]:
        """The events of all jobs with their places, and pings. Raises ApiError when one of them fails."""
        async with aclosing(self.told(ping_s)) as told:
            async for place, event in told:
                if event["type"] == "error":
                    failure = of_code(event["code"], event["message"], retryable=event["retryable"])
                    raise await self.failed(failure)
                if event["type"] == "done" and event["finish_reason"] == "cancelled":
                    raise ApiError(499, f"job {self.jobs[place].id} was cancelled", code="cancelled")
                yield place, event

    async def told(self, ping_s: float = math.inf) -> AsyncGenerator[Placed, None]:
        """As `events`; a job's failure is an event like others."""
        streams = [job.stream(timeout=math.inf, ping=ping_s) for job in self.jobs]
        async with aclosing(_merged(streams)) as events:
            async for place, event in events:
                self._seen[place] = event.get("seq", self._seen.get(place, -1))
                if is_terminal(event):
                    self._ended.add(place)
                if event["type"] == "done":
                    self.usages[place] = event["usage"]
                yield place, event

    async def first_of(self, events: AsyncGenerator[Placed, None]) -> Placed:
        """The first event, for which a stream waits: what a worker finds wrong at once is a status. Raises ApiError,
        ClientDisconnect."""
        return await unless_gone(self.asked.request, _next(events))

    def stream_of(self, frames: AsyncGenerator[bytes, None], events: AsyncGenerator[Placed, None]) -> EventStream:
        """An answer of frames, which are made of these events. From now on this is closed with it."""

        async def close() -> None:
            await events.aclose()
            await self.close()

        self._is_streamed = True
        return EventStream(frames, close, self.headers)

    @contextlib.contextmanager
    def without_events(self) -> Iterator[None]:
        """Events may be missing inside: a result outlives them, and an idempotency key may ask for it a day later."""
        try:
            yield
        except (StreamTrimmed, UnknownJob):
            if not self.is_kept:
                raise

    async def result(self, place: int = 0) -> Result:
        """The result of a job that has ended. Raises ApiError."""
        try:
            result: Result = await self.jobs[place].result(RESULT_S)
        except JobError as error:
            raise await self.failed(of_job(error)) from None
        return result

    async def finished(self) -> Result:
        """The result of the one job, once it is there. Raises ApiError."""
        with self.without_events():
            async for _ in self.events():
                pass
        return await self.result()

    async def __aenter__(self) -> Running:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_streamed:
            await self.close()

    async def close(self) -> None:
        """Once, however the request ends. What is left to do is done although the request may be cancelled."""
        if self._is_closed:
            return
        self._is_closed = True
        gateway = self.asked.gateway
        for place, job in enumerate(self.jobs):
            if place not in self._ended and not self.is_kept:
                gateway.afterwards(job.cancel())
        if isinstance(self._admission, Unlimited):
            self._count_tokens()
        else:
            gateway.afterwards(self._settle(), until_close=self.is_kept)

    def _count_tokens(self) -> None:
        """Those of jobs whose ends were seen, for Prometheus."""
        self.asked.gateway.counts.took(self.asked.caller.tenant, self.usages.values())

    async def _settle(self) -> None:
        """The request is charged for what its jobs took, once they have ended: soon, if they are cancelled now."""
        going_on = [place for place in range(len(self.jobs)) if place not in self._ended]
        num_tokens = None
        try:
            with contextlib.suppress(JobError, TimeoutError):
                async with asyncio.timeout(None if self.is_kept else CANCELLED_S):
                    await asyncio.gather(*map(self._read_end, going_on))
                if self._has_usage or not self.usages:
                    num_tokens = sum(u["prompt_tokens"] + u["completion_tokens"] for u in self.usages.values())
        finally:
            self._count_tokens()
            await self._admission.end(num_tokens)

    async def _read_end(self, place: int) -> None:
        async for event in self.jobs[place].stream(self._seen.get(place, -1), math.inf):
            if event["type"] == "done":
                self.usages[place] = event["usage"]


async def run_one(
    asked: Asked,
    model: str,
    num_tokens: int,
    call: Callable[[str | None], Awaitable[AsyncJob[Any]]],
    *,
    has_usage: bool = True,
) -> tuple[Any, dict[str, str]]:
    """The result of one job, and what headers its answer has. Raises ApiError, InvalidJob, ClientDisconnect."""

    async def run() -> Any:
        await running.admit(num_tokens)
        await running.submit(call)
        return await running.finished()

    async with Running(asked, model, asked.tier(), has_usage=has_usage) as running:
        return await unless_gone(asked.request, run()), running.headers


async def _next(events: AsyncGenerator[Placed, None]) -> Placed:
    return await anext(events)


async def _cancel_when_there(submitting: asyncio.Future[AsyncJob[Any]]) -> None:
    await (await submitting).cancel()


async def _merged(streams: list[AsyncIterator[Event]]) -> AsyncGenerator[Placed, None]:
    """The events of all streams as they come. A slow reader holds all of them up."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:  # type: ignore[type-var]
            async for event in only:
                yield 0, event
        return
    queue: asyncio.Queue[Placed | BaseException | None] = asyncio.Queue(BUFFERED)

    async def read(place: int, stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put((place, event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(read(place, stream)) for place, stream in enumerate(streams)]
    try:
        for _ in streams:
            while (told := await queue.get()) is not None:
                if isinstance(told, BaseException):
                    raise told
                yield told
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)

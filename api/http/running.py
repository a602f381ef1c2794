"""The jobs of one request, from their submission to their ends. A client that disconnects cancels them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from cellama.api.client.async_client import AsyncClient, AsyncJob
from cellama.api.openai.chunks import reasoning_tokens_of
from cellama.config.logging import log_context
from cellama.tasks.contract.all_kinds import Result
from cellama.tasks.contract.errors import InvalidJob, JobError, StreamTrimmed, UnknownJob
from cellama.tasks.contract.events import Event, is_terminal
from cellama.tasks.traces.gate import trace_id_here

from .auth import Admission, Unlimited
from .errors import ApiError, of_code, of_job, of_worker
from .parsing import ParsedRequest, count
from .sse import EventStream, with_errors

T = TypeVar("T")

log = logging.getLogger(__name__)

RESULT_S = 30.0  # wait for a result: it is stored with the last event, so only an outage takes longer
CANCELLED_S = 10.0  # wait for the end of a job that is cancelled: a worker needs a step, Redis perhaps seconds
BUFFERED = 4  # events of several jobs that wait for a slow reader: more would only take memory
WARNINGS = "x-cellama-warnings"
MAX_HEADER_CHARS = 2048  # proxies take 4 to 8 KiB for all headers of an answer together

Placed = tuple[int, Event]
Call = Callable[[str | None], Awaitable[AsyncJob[Any]]]  # of an idempotency key: it queues a job


class RunningJobs:
    """One job, or one for each of several prompts. Those that have not ended when it is closed are cancelled, unless
    the request has an idempotency key: its client will ask again. To be used by `async with`."""

    def __init__(
        self,
        parsed: ParsedRequest,
        model: str,
        tier: str,
        *,
        has_usage: bool = True,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`model` is as the job names it. Jobs without usage are charged for the tokens that were estimated. `names`
        are the caller's names of the job's parameters, for what a worker finds wrong with the body."""
        self.parsed = parsed
        self.model = model
        self.tier = tier
        self.names = names or {}
        self.jobs: list[AsyncJob[Any]] = []
        self.usages: dict[int, Any] = {}  # of the jobs that have ended
        self.is_kept = parsed.idempotency_key is not None
        self._ended: set[int] = set()
        self._seen: dict[int, int] = {}  # of each job, the number of its last event
        self._admission: Admission = parsed.context.hand_over()
        self._has_usage = has_usage
        self._is_streamed = self._is_closed = False

    @property
    def headers(self) -> dict[str, str]:
        return dict(self._admission.headers)

    def answer(self, body: Mapping[str, Any]) -> JSONResponse:
        """Return an answer that comes all at once."""
        return JSONResponse(body, headers={**self.headers, **warning_headers(body)})

    async def admit(self, num_tokens: int, num_jobs: int = 1) -> None:
        """Charge the request. Raises ApiError: 403 for a model that is not allowed, 429 above the caller's limits."""
        self.parsed.caller.check_model(self.model)
        await self._admission.reserve(num_tokens, num_jobs)

    async def submit(self, *calls: Call) -> None:
        """Queue a job by each of these calls. Raises ApiError, and InvalidJob for a body that is not valid."""
        key = self.parsed.idempotency_key
        for place, call in enumerate(calls):
            own = key if key is None or len(calls) == 1 else f"{key} {place}"
            submitting = asyncio.ensure_future(call(own))
            try:
                self.jobs.append(await asyncio.shield(submitting))
            except asyncio.CancelledError:
                if not self.is_kept:
                    self.parsed.gateway.afterwards(_cancel_when_there(submitting))
                raise
            except InvalidJob:
                raise  # the endpoint knows how the caller names the fields
            except JobError as error:
                raise await self.failed(of_job(error)) from None
        with log_context("", trace_id_here()):
            log.info("request %s: job %s", self.parsed.request.state.request_id, ", ".join(job.id for job in self.jobs))
        await self._check_wait()

    async def _check_wait(self) -> None:
        """If the queue is long, check this job's own position: bulk work does not delay urgent jobs."""
        gateway = self.parsed.gateway
        limit = gateway.settings.gateway_max_wait_s
        if not limit or self.tier == "flex" or await gateway.wait_s(self.model, self.tier) <= limit:
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
        """Return the error as the client gets it."""
        error = of_worker(error, self.names)
        if error.code == "unknown_adapter" and self.parsed.caller.adapters is not None:  # it names others' adapters
            error = ApiError(
                error.status, "the adapter is not loaded for this model", code=error.code, param="adapters"
            )
        return await self.parsed.gateway.with_wait(error, self.model, self.tier)

    async def _failure(self, event: Mapping[str, Any]) -> ApiError:
        return await self.failed(of_code(event["code"], event["message"], retryable=event["retryable"]))

    async def events(self, ping_s: float = math.inf) -> AsyncGenerator[Placed, None]:
        """Yield the events of all jobs with the indices of the jobs, and pings. Raises ApiError when a job fails."""
        async with aclosing(self.events_and_failures(ping_s)) as events:
            async for place, event in events:
                if event["type"] == "error":
                    raise await self._failure(event)
                if event["type"] == "done" and event["finish_reason"] == "cancelled":
                    raise ApiError(499, f"job {self.jobs[place].id} was cancelled", code="cancelled")
                yield place, event

    async def events_and_failures(self, ping_s: float = math.inf) -> AsyncGenerator[Placed, None]:
        """As `events`, but the failure of a job is an event like others."""
        streams = [job.stream(timeout=math.inf, ping=ping_s) for job in self.jobs]
        async with aclosing(_merged(streams)) as events:
            async for place, event in events:
                self._seen[place] = event.get("seq", self._seen.get(place, -1))
                if is_terminal(event):
                    self._ended.add(place)
                if event["type"] == "done":
                    self.usages[place] = event["usage"]
                yield place, event

    async def stream(
        self,
        frames_of: Callable[[AsyncGenerator[Placed, None]], AsyncGenerator[bytes, None]],
        error_frame: Callable[[ApiError], bytes],
        *,
        waits: bool = True,
        with_failures: bool = False,
    ) -> EventStream:
        """Return an answer of the frames that `frames_of` makes of the events; an error ends it with a last frame. From
        now on the jobs are closed with the answer.

        If it `waits` for the first event, what a worker finds wrong at once is a status. `with_failures` hands the
        failure of a job on as an event. Raises ApiError, ClientDisconnect.
        """
        keepalive_s = self.parsed.gateway.settings.gateway_keepalive_s
        events = self.events_and_failures(keepalive_s) if with_failures else self.events(keepalive_s)
        first = await unless_gone(self.parsed.request, _next(events)) if waits else None
        if first is not None and first[1]["type"] == "error":
            raise await self._failure(first[1])

        async def all_events() -> AsyncGenerator[Placed, None]:
            if first is not None:
                yield first
            async for placed in events:
                yield placed

        async def close() -> None:
            await events.aclose()
            await self.close()

        self._is_streamed = True
        return EventStream(with_errors(frames_of(all_events()), error_frame), close, self.headers)

    async def result(self, place: int = 0) -> Result:
        """Return the result of a job that has ended. Raises ApiError."""
        try:
            result: Result = await self.jobs[place].result(RESULT_S)
        except JobError as error:
            raise await self.failed(of_job(error)) from None
        return result

    async def ended(self) -> int:
        """Wait until all jobs have ended. Return how many tokens of reasoning their events have. Raises ApiError.

        A result outlives the events, and an idempotency key may ask for it a day later: then there are no events.
        """
        num_tokens = 0
        try:
            async with aclosing(self.events()) as events:
                async for _, event in events:
                    num_tokens += reasoning_tokens_of(event)
        except (StreamTrimmed, UnknownJob):
            if not self.is_kept:
                raise
        return num_tokens

    async def __aenter__(self) -> RunningJobs:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_streamed:
            await self.close()

    async def close(self) -> None:
        """Cancel unfinished jobs and settle the charge, even if the request is cancelled. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        gateway = self.parsed.gateway
        for place, job in enumerate(self.jobs):
            if place not in self._ended and not self.is_kept:
                gateway.afterwards(job.cancel())
        if isinstance(self._admission, Unlimited):
            self._count_tokens()
        else:
            gateway.afterwards(self._settle(), until_close=self.is_kept)

    def _count_tokens(self) -> None:
        """Count the tokens of jobs whose ends were seen."""
        self.parsed.gateway.counts.count_tokens(self.parsed.caller.tenant, self.usages.values())

    async def _settle(self) -> None:
        """Charge the request for what its jobs took, once they have ended. Cancelled jobs end soon."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsRequest(ABC):
    """A request that is answered by jobs: what they are, and how their events and results become its answer."""

    model: str  # as the jobs name it
    params: dict[str, Any]  # of each job
    tier: str
    names: Mapping[str, str]  # the caller's names of these parameters
    is_stream: bool
    prompt_tokens: int  # of all jobs, about

    @property
    def num_jobs(self) -> int:
        """How many texts are generated."""
        return 1

    @property
    def num_tokens(self) -> int:
        """About how many tokens the jobs read and generate."""
        return self.prompt_tokens + self.num_jobs * count(self.params["max_tokens"], 1)

    @abstractmethod
    def calls(self, client: AsyncClient) -> list[Call]:
        """Return a call for each job, which gets its idempotency key and queues it."""

    @abstractmethod
    def refusal(self, error: InvalidJob) -> ApiError:
        """Return what is wrong with the body, in the words of its API."""

    @abstractmethod
    async def whole(self, running: RunningJobs) -> dict[str, Any]:
        """Return the body of an answer that comes all at once."""

    @abstractmethod
    def frames(self, running: RunningJobs, events: AsyncGenerator[Placed, None]) -> AsyncGenerator[bytes, None]:
        """Make the frames of a stream of the events."""

    @abstractmethod
    def error_frame(self, error: ApiError) -> bytes:
        """Return the last frame of a stream that an error ends."""


async def run_jobs(parsed: ParsedRequest, asked: JobsRequest) -> Response:
    """Run the jobs of a request, and answer with their results or their stream. Raises ApiError, ClientDisconnect."""

    async def start() -> None:
        try:
            await running.admit(asked.num_tokens, asked.num_jobs)
            await running.submit(*asked.calls(parsed.gateway.client))
        except InvalidJob as error:
            raise asked.refusal(error) from None

    async with RunningJobs(parsed, asked.model, asked.tier, names=asked.names) as running:
        await unless_gone(parsed.request, start())
        if asked.is_stream:
            return await running.stream(partial(asked.frames, running), asked.error_frame)
        return running.answer(await unless_gone(parsed.request, asked.whole(running)))


async def run_one(
    parsed: ParsedRequest,
    model: str,
    num_tokens: int,
    call: Call,
    *,
    has_usage: bool = True,
) -> tuple[Any, dict[str, str]]:
    """Return the result of one job, and the headers of its answer. Raises ApiError, InvalidJob, ClientDisconnect."""

    async def run() -> Any:
        await running.admit(num_tokens)
        await running.submit(call)
        await running.ended()
        return await running.result()

    async with RunningJobs(parsed, model, parsed.tier(), has_usage=has_usage) as running:
        return await unless_gone(parsed.request, run()), running.headers


async def _next(events: AsyncGenerator[Placed, None]) -> Placed:
    return await anext(events)


async def _cancel_when_there(submitting: asyncio.Future[AsyncJob[Any]]) -> None:
    await (await submitting).cancel()


async def _merged(streams: list[AsyncIterator[Event]]) -> AsyncGenerator[Placed, None]:
    """Yield the events of all streams as they come. A slow reader delays all of them."""
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
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work. If the client disconnects before, the work is cancelled, and ClientDisconnect is
    raised. The body must have been read.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def warning_headers(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return the header for the `warnings` of an answer: a JSON array in ASCII. The last ones are left out if they are
    too long together, and counted instead."""
    warnings: list[str] = answer.get("warnings", [])
    if not warnings:
        return {}
    num_shown, value = len(warnings), json.dumps(warnings)
    while len(value) > MAX_HEADER_CHARS:
        num_shown -= 1
        value = json.dumps([*warnings[:num_shown], f"and {len(warnings) - num_shown} more"])
    return {WARNINGS: value}

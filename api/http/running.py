"""Run a request's jobs from queueing to their results. Disconnecting cancels the jobs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from cellama.api.client.async_client import AsyncClient, AsyncJob
from cellama.api.openai.chunks import reasoning_tokens_of
from cellama.config.logging import event_logger, log_context
from cellama.tasks.contract.all_kinds import Result
from cellama.tasks.contract.errors import InvalidJob, JobError, StreamTrimmed, UnknownJob
from cellama.tasks.contract.events import Event, is_terminal
from cellama.tasks.traces.gate import current_trace_id

from .auth import Admission, Unlimited
from .errors import ApiError, key_reused, of_code, of_job, of_worker
from .gateway import WAITS_FRESH_S
from .parsing import ParsedRequest, count
from .sse import EVENT_STREAM, EventStream, keep_alive, with_errors

T = TypeVar("T")

log = event_logger(__name__)

RESULT_S = 30.0  # wait for a result: it is stored with the last event, so only an outage takes longer
CANCELLED_S = 10.0  # wait for the end of a cancelled job: a worker needs a step, and Redis perhaps seconds
MAX_BUFFERED = 4  # events of several jobs that wait for a slow reader: more would only take memory
WARNINGS = "x-cellama-warnings"
MAX_HEADER_CHARS = 2048  # proxies accept 4 to 8 KiB for all headers of a response together

IndexedEvent = tuple[int, Event]  # with the index of its job
Call = Callable[[str | None], Awaitable[AsyncJob[Any]]]  # queues a job under an idempotency key


class RunningJobs:
    """Runs a request's jobs, which are either a single job or one job per prompt.

    Use this class with `async with`. Closing cancels jobs that have not finished, unless the request has an idempotency
    key. A client that sends such a key is expected to repeat the request.
    """

    def __init__(
        self,
        parsed: ParsedRequest,
        model: str,
        tier: str,
        *,
        has_usage: bool = True,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Take over the request's charge.

        `model` is the model name that the jobs use. Jobs that don't report their usage are charged for the estimated
        tokens. `names` maps job parameters to the names that the caller used. The mapping is needed for errors that a
        worker reports.
        """
        self.parsed = parsed
        self.model = model
        self.tier = tier
        self.names = names or {}
        self.jobs: list[AsyncJob[Any]] = []
        self.usages: dict[int, Any] = {}  # token counts of finished jobs
        self.survives_disconnect = parsed.idempotency_key is not None
        self._ended: set[int] = set()
        self._last_seqs: dict[int, int] = {}  # number of the last event of each job
        self._admission: Admission = parsed.context.hand_over()
        self._has_usage = has_usage
        self._is_streamed = self._is_closed = False

    @property
    def headers(self) -> dict[str, str]:
        return dict(self._admission.headers)

    def answer(self, body: Mapping[str, Any]) -> JSONResponse:
        """Return the response to a non-streaming request."""
        return JSONResponse(body, headers={**self.headers, **warning_headers(body)})

    async def admit(self, num_tokens: int, num_jobs: int = 1) -> None:
        """Charge tokens and jobs. Raises ApiError (403 if the model is not allowed, 429 if a limit is exceeded)."""
        self.parsed.caller.check_model(self.model)
        await self._admission.reserve(num_tokens, num_jobs)

    async def submit(self, *calls: Call) -> None:
        """Queue one job for each of `calls`. Raises ApiError, and InvalidJob if the body is invalid."""
        key = self.parsed.idempotency_key
        for index, call in enumerate(calls):
            job_key = key if key is None or len(calls) == 1 else f"{key} {index}"
            submitting = asyncio.ensure_future(call(job_key))
            try:
                self.jobs.append(await asyncio.shield(submitting))
            except asyncio.CancelledError:
                if not self.survives_disconnect:
                    self.parsed.gateway.afterwards(_cancel_when_queued(submitting))
                raise
            except InvalidJob as error:
                if key is not None and str(error).startswith("idempotency_key: "):
                    raise key_reused() from None
                raise  # the endpoint replaces the names of the fields
            except JobError as error:
                raise await self.failed(of_job(error)) from None
        with log_context("", current_trace_id()):
            job_ids = ",".join(job.id for job in self.jobs)
            log.info("request queued", request=self.parsed.request.state.request_id, jobs=job_ids)
        await self._check_wait()

    async def _check_wait(self) -> None:
        """Raise ApiError (429) if the first job would wait longer than allowed (`longest_wait`).

        The cached estimate for new jobs is used first. If it exceeds the limit, or the limit is shorter than the time
        for which estimates are cached, the estimate for this job's own position is used.
        """
        gateway = self.parsed.gateway
        limit_s, remedy = longest_wait(gateway.settings.gateway_max_wait_s, self.tier, self.parsed.body.get("timeout"))
        if math.isinf(limit_s):
            return
        if limit_s > 2 * WAITS_FRESH_S and await gateway.wait_s(self.model, self.tier) <= limit_s:
            return
        eta_s = (await self.jobs[0].position()).eta_s or 0.0
        if eta_s > limit_s:
            raise ApiError(
                429,
                f"the estimated wait is {eta_s:.3g} s, and the limit is {limit_s:g} s ({remedy}",
                code="queue_full",
                retry_after_s=eta_s - limit_s,
            )

    async def failed(self, error: ApiError) -> ApiError:
        """Convert a job's error into the error for the client."""
        error = of_worker(error, self.names)
        if error.code == "unknown_adapter" and self.parsed.caller.adapters is not None:  # it lists others' adapters
            error = ApiError(
                error.status, "adapters: the adapter is not loaded for this model", code=error.code, param="adapters"
            )
        return await self.parsed.gateway.with_wait(error, self.model, self.tier)

    async def _failure(self, event: Mapping[str, Any]) -> ApiError:
        return await self.failed(of_code(event["code"], event["message"], retryable=event["retryable"]))

    async def events(self, ping_s: float = math.inf) -> AsyncGenerator[IndexedEvent, None]:
        """Yield pings and the events of all jobs. Raises ApiError when a job fails."""
        async with aclosing(self.events_and_failures(ping_s)) as events:
            async for index, event in events:
                if event["type"] == "error":
                    raise await self._failure(event)
                if event["type"] == "done" and event["finish_reason"] == "cancelled":
                    raise ApiError(499, f"job {self.jobs[index].id} was cancelled", code="cancelled")
                yield index, event

    async def events_and_failures(self, ping_s: float = math.inf) -> AsyncGenerator[IndexedEvent, None]:
        """Yield the same events as `events`, but yield a job's failure as an event instead of raising it."""
        streams = [job.stream(timeout=math.inf, ping=ping_s) for job in self.jobs]
        async with aclosing(_merged(streams)) as events:
            async for index, event in events:
                self._last_seqs[index] = event.get("seq", self._last_seqs.get(index, -1))
                if is_terminal(event):
                    self._ended.add(index)
                if event["type"] == "done":
                    self.usages[index] = event["usage"]
                yield index, event

    async def keep_alive(self, index: int) -> bytes:
        """Return the comment for a job's ping, which contains the job's position while the job is waiting."""
        if self._last_seqs.get(index, -1) >= 0:
            return keep_alive()
        return keep_alive(await self.parsed.gateway.wait_of(self.jobs[index].id, self.model, self.tier))

    async def stream(
        self,
        frames_of: Callable[[AsyncGenerator[IndexedEvent, None]], AsyncGenerator[bytes, None]],
        error_frame: Callable[[ApiError], bytes],
        *,
        waits: bool = True,
        with_failures: bool = False,
        media_type: str = EVENT_STREAM,
    ) -> EventStream:
        """Return a streamed response.

        Closing the response also calls `close`, which cancels unfinished jobs. `frames_of` converts the events into
        frames of this media type, and `error_frame` creates the last frame after an error. If `waits` is true, the
        method returns after the first event, so that errors that a worker finds immediately have their own HTTP status.
        If `with_failures` is true, a job's failure is passed on as an event. Raises ApiError or ClientDisconnect.
        """
        keepalive_s = self.parsed.gateway.settings.gateway_keepalive_s
        events = self.events_and_failures(keepalive_s) if with_failures else self.events(keepalive_s)
        first = await unless_disconnected(self.parsed.request, _next(events)) if waits else None
        if first is not None and first[1]["type"] == "error":
            raise await self._failure(first[1])

        async def all_events() -> AsyncGenerator[IndexedEvent, None]:
            if first is not None:
                yield first
            async for indexed in events:
                yield indexed

        async def close() -> None:
            await events.aclose()
            await self.close()

        self._is_streamed = True
        frames = with_errors(frames_of(all_events()), error_frame)
        return EventStream(frames, close, self.headers, media_type=media_type)

    async def result(self, index: int = 0) -> Result:
        """Return the result of a finished job. Raises ApiError."""
        try:
            result: Result = await self.jobs[index].result(RESULT_S)
        except JobError as error:
            raise await self.failed(of_job(error)) from None
        return result

    async def wait(self) -> int:
        """Wait until all jobs have finished. Return the number of reasoning tokens in the jobs' events.

        Raises ApiError. Results are stored longer than events. The events may therefore have expired when a request is
        repeated with the same idempotency key.
        """
        num_tokens = 0
        try:
            async with aclosing(self.events()) as events:
                async for _, event in events:
                    num_tokens += reasoning_tokens_of(event)
        except (StreamTrimmed, UnknownJob):
            if not self.survives_disconnect:
                raise
        return num_tokens

    async def __aenter__(self) -> RunningJobs:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_streamed:
            await self.close()

    async def close(self) -> None:
        """Cancel unfinished jobs and settle the charge, even if the request is cancelled.

        This method can be called repeatedly.
        """
        if self._is_closed:
            return
        self._is_closed = True
        gateway = self.parsed.gateway
        for index, job in enumerate(self.jobs):
            if index not in self._ended and not self.survives_disconnect:
                gateway.afterwards(job.cancel())
        if isinstance(self._admission, Unlimited):
            self._count_tokens()
        else:
            gateway.afterwards(self._settle(), until_close=self.survives_disconnect)

    def _count_tokens(self) -> None:
        """Add the jobs' tokens to the gateway's counts. Only jobs that are known to have ended are counted."""
        self.parsed.gateway.counts.count_tokens(self.parsed.caller.tenant, self.usages.values())

    async def _settle(self) -> None:
        """Wait until the jobs have finished, and replace the charge with their actual token usage.

        Cancelled jobs finish quickly.
        """
        unfinished = [index for index in range(len(self.jobs)) if index not in self._ended]
        num_tokens = None
        try:
            with contextlib.suppress(JobError, TimeoutError):
                async with asyncio.timeout(None if self.survives_disconnect else CANCELLED_S):
                    await asyncio.gather(*map(self._read_end, unfinished))
                if self._has_usage or not self.usages:
                    num_tokens = sum(u["prompt_tokens"] + u["completion_tokens"] for u in self.usages.values())
        finally:
            self._count_tokens()
            await self._admission.end(num_tokens)

    async def _read_end(self, index: int) -> None:
        async for event in self.jobs[index].stream(self._last_seqs.get(index, -1), math.inf):
            if event["type"] == "done":
                self.usages[index] = event["usage"]


def longest_wait(max_wait_s: float, tier: str, timeout_s: object) -> tuple[float, str]:
    """Return the longest wait in seconds with which a request is accepted, and the end of the message for others.

    A request of any tier is refused if it would still be waiting when its own timeout expires. `max_wait_s` applies to
    all tiers except `flex`, unless it is 0.
    """
    limit_s = math.inf if not max_wait_s or tier == "flex" else max_wait_s
    if isinstance(timeout_s, int | float) and 0 < timeout_s < limit_s:
        return timeout_s, "the request's timeout); retry later, or increase the timeout"
    return limit_s, "gateway_max_wait_s); retry later, or use service_tier flex"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsRequest(ABC):
    """A parsed request that is answered by jobs.

    The object provides the calls that queue the jobs, and converts their events and results into the response.
    """

    media_type: ClassVar[str] = EVENT_STREAM  # media type of a streamed response

    model: str  # the model's name in the jobs
    params: dict[str, Any]  # parameters of each job
    tier: str
    names: Mapping[str, str]  # parameter of the job → name that the caller used
    is_stream: bool
    prompt_tokens: int  # estimate for all jobs

    @property
    def num_jobs(self) -> int:
        """The number of answers that the jobs will generate."""
        return 1

    @property
    def num_tokens(self) -> int:
        """The estimated number of tokens that the jobs will prefill and generate."""
        return self.prompt_tokens + self.num_jobs * count(self.params["max_tokens"], 1)

    @abstractmethod
    def calls(self, client: AsyncClient) -> list[Call]:
        """Return one call per job. Each call takes an idempotency key and queues the job."""

    @abstractmethod
    def refusal(self, error: InvalidJob) -> ApiError:
        """Return the error for an invalid body, using this API's parameter names."""

    @abstractmethod
    async def body(self, running: RunningJobs) -> dict[str, Any]:
        """Return the response body for a non-streaming request."""

    @abstractmethod
    def frames(self, running: RunningJobs, events: AsyncGenerator[IndexedEvent, None]) -> AsyncGenerator[bytes, None]:
        """Convert events into the stream's frames."""

    @abstractmethod
    def error_frame(self, error: ApiError) -> bytes:
        """Return the last frame of a failed stream."""


async def run_jobs(parsed: ParsedRequest, jobs_request: JobsRequest) -> Response:
    """Run a request's jobs, and return their results or a stream. Raises ApiError or ClientDisconnect."""

    async def start() -> None:
        try:
            await running.admit(jobs_request.num_tokens, jobs_request.num_jobs)
            await running.submit(*jobs_request.calls(parsed.gateway.client))
        except InvalidJob as error:
            raise jobs_request.refusal(error) from None

    async with RunningJobs(parsed, jobs_request.model, jobs_request.tier, names=jobs_request.names) as running:
        await unless_disconnected(parsed.request, start())
        if jobs_request.is_stream:
            frames_of = partial(jobs_request.frames, running)
            return await running.stream(frames_of, jobs_request.error_frame, media_type=jobs_request.media_type)
        return running.answer(await unless_disconnected(parsed.request, jobs_request.body(running)))


async def run_one(
    parsed: ParsedRequest,
    model: str,
    num_tokens: int,
    call: Call,
    *,
    has_usage: bool = True,
) -> tuple[Any, dict[str, str]]:
    """Run one job, and return its result and the response headers.

    Raises ApiError, InvalidJob and ClientDisconnect.
    """

    async def run() -> Any:
        await running.admit(num_tokens)
        await running.submit(call)
        await running.wait()
        return await running.result()

    async with RunningJobs(parsed, model, parsed.tier(), has_usage=has_usage) as running:
        return await unless_disconnected(parsed.request, run()), running.headers


async def _next(events: AsyncGenerator[IndexedEvent, None]) -> IndexedEvent:
    return await anext(events)


async def _cancel_when_queued(submitting: asyncio.Future[AsyncJob[Any]]) -> None:
    await (await submitting).cancel()


async def _merged(streams: list[AsyncIterator[Event]]) -> AsyncGenerator[IndexedEvent, None]:
    """Yield the events of all streams as they arrive. A slow reader delays all streams."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:  # type: ignore[type-var]
            async for event in only:
                yield 0, event
        return
    queue: asyncio.Queue[IndexedEvent | BaseException | None] = asyncio.Queue(MAX_BUFFERED)

    async def read(index: int, stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put((index, event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(read(index, stream)) for index, stream in enumerate(streams)]
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


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work for a request whose body has been read, and return the result.

    If the client disconnects first, cancel the work and raise ClientDisconnect.
    """
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, disconnected):
            task.cancel()
        await asyncio.gather(working, disconnected, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def warning_headers(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return the header that contains an answer's `warnings` as a JSON array in ASCII.

    If the warnings are too long, the last warnings are replaced by a count of the omitted warnings.
    """
    warnings: list[str] = answer.get("warnings", [])
    if not warnings:
        return {}
    num_shown, value = len(warnings), json.dumps(warnings)
    while len(value) > MAX_HEADER_CHARS:
        num_shown -= 1
        value = json.dumps([*warnings[:num_shown], f"and {len(warnings) - num_shown} more"])
    return {WARNINGS: value}

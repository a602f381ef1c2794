"""The context of a request: its caller, its charge, and its body's memory reservation and time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import Message, Receive

from cellama.tasks.contract.json_values import shorten

from .auth import CREATE_KEY, Admission, Caller, Unlimited
from .errors import ApiError
from .gateway import BUSY_RETRY_S, Gateway, gateway_of

READ_ONLY_METHODS = ("GET", "HEAD", "OPTIONS")
MIN_BYTES_PER_S = 8 << 10  # minimum rate of a body; slower transfer counts towards `gateway_body_timeout_s`


class RequestContext:
    """The resources held by one request.

    The middleware that creates the context releases its resources when the request ends.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.admission: Admission = Unlimited()
        self.gateway = gateway
        self._holder = ""
        self._num_bytes = 0

    def hold(self, caller: Caller, num_bytes: int) -> None:
        """Reserve memory until the request ends. Raises the same ApiError as BodyMemory.take."""
        self._holder = caller.key_id or caller.tenant or ""
        self.gateway.body_memory.take(self._holder, num_bytes, self._num_bytes)
        self._num_bytes += num_bytes

    def hand_over(self) -> Admission:
        """Return the admission. The caller of this method becomes responsible for settling the admission."""
        admission, self.admission = self.admission, Unlimited()
        return admission

    def end(self) -> None:
        """Release the memory, and settle the admission unless it was handed over."""
        if self._num_bytes:
            self.gateway.body_memory.give_back(self._holder, self._num_bytes)
            self._num_bytes = 0
        if not isinstance(self.admission, Unlimited):  # none of its jobs was queued
            self.gateway.afterwards(self.hand_over().end(0))


def in_time(receive: Receive, timeout_s: float) -> Receive:
    """Return a `receive` that raises ApiError (408) for a body that arrives too slowly.

    A body may arrive up to `timeout_s` seconds later than it would at a rate of MIN_BYTES_PER_S. Only the time spent
    waiting for the client counts.
    """
    remaining_s, is_complete = timeout_s, False

    async def receive_in_time() -> Message:
        nonlocal remaining_s, is_complete
        if is_complete:
            return await receive()
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(remaining_s):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body arrived too slowly: it fell more than {timeout_s:g} s behind a rate of {MIN_BYTES_PER_S} "
                "bytes per second (gateway_body_timeout_s); send it faster, or send a smaller body",
                code="slow_body",
                headers={"connection": "close"},
            ) from None
        earned_s = len(message.get("body", b"")) / MIN_BYTES_PER_S
        remaining_s = min(timeout_s, remaining_s - (time.monotonic() - started_at) + earned_s)
        is_complete = not message.get("more_body", False)
        return message

    return receive_in_time


def context_of(request: Request) -> RequestContext:
    """Return the context that the middleware created for the request."""
    context: RequestContext = request.state.context
    return context


def check_load(gateway: Gateway) -> None:
    """Raise ApiError (503) if too many requests are in progress."""
    limit = gateway.settings.gateway_max_requests
    if gateway.counts.num_in_flight > limit:
        raise ApiError(
            503,
            f"{limit} requests are in progress, the maximum (gateway_max_requests); retry shortly",
            code="overloaded",
            retry_after_s=BUSY_RETRY_S,
        )


async def caller_of(request: Request) -> Caller:
    """Return the request's sender. Raises ApiError (401, 403, or 503 if too many requests are in progress)."""
    gateway = gateway_of(request)
    check_load(gateway)
    caller = await gateway.access.authenticate(request.headers)
    if caller.key_id is None and caller.tenant is None:
        check_origin(request, gateway.settings.gateway_cors_origins)
    return caller


async def charged(request: Request) -> Caller:
    """Authenticate the sender, charge the request to the sender, and return the sender.

    Raises ApiError (401, 403, 429 or 503).
    """
    return await charge(request, await caller_of(request))


async def charge(request: Request, caller: Caller) -> Caller:
    """Charge the request to its authenticated sender, and return the sender. Raises ApiError (429)."""
    context_of(request).admission = await gateway_of(request).access.admit(caller)
    return caller


def check_origin(request: Request, allowed: Sequence[str]) -> None:
    """Raise ApiError (403) if a web page from another site sends a request that changes data.

    If there are no keys, only this check distinguishes such a request from a request sent by one of the user's own
    programs.
    """
    if request.method in READ_ONLY_METHODS:
        return
    origin = request.headers.get("origin")
    if "*" in allowed or origin in allowed:
        return
    is_foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host", "").lower()
    if is_foreign or request.headers.get("sec-fetch-site") == "cross-site":
        page = "another site" if origin is None else shorten(origin)
        raise ApiError(
            403,
            f"a page from {page} may not change data on a gateway without keys; add its origin to "
            f"gateway_cors_origins, or {CREATE_KEY}",
            code="origin_not_allowed",
        )

"""The context of a request: who sends it, what it is charged, the memory of its body, how slow the body may be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import Message, Receive

from cellama.tasks.contract.json_values import shorten

from .auth import MAKE_ONE, Admission, Caller, Unlimited
from .errors import ApiError
from .gateway import BUSY_RETRY_S, Gateway, gateway_of

READING = ("GET", "HEAD", "OPTIONS")  # methods that change nothing
MIN_BYTES_PER_S = 8 << 10  # of a body: what comes more slowly uses up `gateway_body_timeout_s`


class RequestContext:
    """What one request holds. The middleware that creates it gives back what is left when the request ends."""

    def __init__(self, gateway: Gateway) -> None:
        self.admission: Admission = Unlimited()
        self.gateway = gateway
        self._holder = ""
        self._num_bytes = 0

    def hold(self, caller: Caller, num_bytes: int) -> None:
        """Take memory until the request ends. Raises ApiError as BodyMemory.take."""
        self._holder = caller.key_id or caller.tenant or ""
        self.gateway.body_memory.take(self._holder, num_bytes, self._num_bytes)
        self._num_bytes += num_bytes

    def hand_over(self) -> Admission:
        """Return the charge. The caller of this must settle it."""
        admission, self.admission = self.admission, Unlimited()
        return admission

    def end(self) -> None:
        """Give the memory back, and settle a charge that was not handed over."""
        if self._num_bytes:
            self.gateway.body_memory.give_back(self._holder, self._num_bytes)
            self._num_bytes = 0
        if not isinstance(self.admission, Unlimited):  # no job of it has begun
            self.gateway.afterwards(self.hand_over().end(0))


def in_time(receive: Receive, timeout_s: float) -> Receive:
    """Return `receive` that raises ApiError (408) for a body that stays behind MIN_BYTES_PER_S for more than this time.
    Only waiting for the client counts."""
    left_s, is_whole = timeout_s, False

    async def receive_in_time() -> Message:
        nonlocal left_s, is_whole
        if is_whole:
            return await receive()
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body came too slowly: more than {timeout_s:g} s behind {MIN_BYTES_PER_S} bytes per second "
                "(gateway_body_timeout_s); send it faster, or send less",
                code="slow_body",
                headers={"connection": "close"},
            ) from None
        earned_s = len(message.get("body", b"")) / MIN_BYTES_PER_S
        left_s = min(timeout_s, left_s - (time.monotonic() - began_at) + earned_s)
        is_whole = not message.get("more_body", False)
        return message

    return receive_in_time


def context_of(request: Request) -> RequestContext:
    """Return the context of the request."""
    context: RequestContext = request.state.context
    return context


async def caller_of(request: Request) -> Caller:
    """Return who sends the request. Raises ApiError: 401, 403, or 503 while there are too many requests."""
    gateway = gateway_of(request)
    limit = gateway.settings.gateway_max_requests
    if gateway.counts.num_in_flight > limit:
        raise ApiError(
            503,
            f"{limit} requests are being handled, which is the limit (gateway_max_requests); send this one again soon",
            code="overloaded",
            retry_after_s=BUSY_RETRY_S,
        )
    caller = await gateway.access.authenticate(request.headers)
    if caller.key_id is None and caller.tenant is None:
        check_origin(request, gateway.settings.gateway_cors_origins)
    return caller


async def charged(request: Request) -> Caller:
    """Return who sends the request, once it is charged as one request. Raises ApiError: 401, 403, 429, 503."""
    caller = await caller_of(request)
    context_of(request).admission = await gateway_of(request).access.admit(caller)
    return caller


def check_origin(request: Request, allowed: Sequence[str]) -> None:
    """Raise ApiError (403) for a change that a page of another site asks for. Without keys nothing else tells such a
    request from one of the user's own programs."""
    if request.method in READING:
        return
    origin = request.headers.get("origin")
    if "*" in allowed or origin in allowed:
        return
    is_foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host", "").lower()
    if is_foreign or request.headers.get("sec-fetch-site") == "cross-site":
        page = "a page of another site" if origin is None else f"a page of {shorten(origin)}"
        raise ApiError(
            403,
            f"{page} may change nothing on a gateway without keys; name its origin in gateway_cors_origins, "
            f"or {MAKE_ONE}",
            code="origin_not_allowed",
        )

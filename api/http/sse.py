"""Answers as server-sent events: the one place that writes frames."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cellama.tasks.contract.errors import JobError

from .errors import ApiError, of_job

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}  # proxies shall pass on each frame at once
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def frame(data: Any, event: str | None = None) -> bytes:
    """One event, with a name where the client wants one."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def with_errors(
    frames: AsyncGenerator[bytes, None], error_frame: Callable[[ApiError], bytes]
) -> AsyncGenerator[bytes, None]:
    """The frames, and a last one for an error that ends them."""
    try:
        async with aclosing(frames):
            async for one in frames:
                yield one
    except ApiError as error:
        yield error_frame(error)
    except JobError as error:
        yield error_frame(of_job(error))


class EventStream(StreamingResponse):
    """Frames, as they come. `close` is called once, however it ends; a client that goes away ends it at once.

    The next frame is asked for when the server has taken the one before it.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
    ) -> None:
        self._frames = frames
        super().__init__(frames, media_type="text/event-stream", headers={**HEADERS, **(headers or {})})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Of a server that says 2.4 Starlette would hear of the end of the connection by the next frame only.
        older = {**scope, "asgi": {**scope.get("asgi", {}), "spec_version": "2.3"}}
        try:
            await super().__call__(older, receive, send)
        except OSError:
            pass  # how such a server says it
        finally:
            await self._frames.aclose()
            await self._close()

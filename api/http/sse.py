"""Stream responses as server-sent events or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cellama.tasks.contract.errors import JobError

from .errors import ApiError, of_job

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}  # proxies must not buffer frames
DONE = b"data: [DONE]\n\n"
EVENT_STREAM, NDJSON = "text/event-stream", "application/x-ndjson"  # media types


def frame(data: Any, event: str | None = None) -> bytes:
    """Return a frame. `event` is the event's name, for clients that require event names."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def keep_alive(wait: str | None = None) -> bytes:
    """Return a comment that keeps a stream open.

    While the stream's job is waiting, the comment is the text that `Gateway.wait_of` returns.
    """
    return f": {wait or 'keep-alive'}\n\n".encode()


def json_line(data: Any) -> bytes:
    """Return a JSON line in ASCII, because some clients also split lines at other characters, such as U+2028."""
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


async def with_errors(
    frames: AsyncGenerator[bytes, None], error_frame: Callable[[ApiError], bytes]
) -> AsyncGenerator[bytes, None]:
    """Yield the frames. If producing the frames fails, yield a frame for the error."""
    try:
        async with aclosing(frames):
            async for one in frames:
                yield one
    except ApiError as error:
        yield error_frame(error)
    except JobError as error:
        yield error_frame(of_job(error))


class EventStream(StreamingResponse):
    """A streamed response.

    The response calls `close` once when it ends, for example when the client disconnects. Each frame is requested after
    the server has accepted the previous frame.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        headers: dict[str, str] | None = None,
        *,
        media_type: str = EVENT_STREAM,
    ) -> None:
        self._frames = frames
        super().__init__(frames, media_type=media_type, headers={**HEADERS, **(headers or {})})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # With ASGI 2.4, Starlette would notice a disconnect only when it sends the next frame.
        older = {**scope, "asgi": {**scope.get("asgi", {}), "spec_version": "2.3"}}
        try:
            await super().__call__(older, receive, send)
        except OSError:
            pass  # raised by a server with ASGI 2.4 after a disconnect
        finally:
            await self._frames.aclose()
            await self._close()

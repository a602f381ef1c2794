"""Send requests to llama-server and OpenAI-compatible APIs asynchronously, with as little work as possible.

Each request uses its own connection, because llama-server closes idle connections under load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

_LONGEST_LINE = 1 << 24  # bytes; an event of a long prompt's end repeats its settings


class Refused(RuntimeError):
    """A reply with a status other than 200. `retry_after_s` is the value of its `retry-after-ms` header, or None."""

    def __init__(self, status: int, retry_after_s: float | None, body: bytes) -> None:
        super().__init__(f"the server replied with HTTP status {status}: {body[:200]!r}")
        self.status = status
        self.retry_after_s = retry_after_s


@contextlib.asynccontextmanager
async def _post(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request and yield the response after its headers. Raises Refused."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LONGEST_LINE)
    try:
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        await writer.drain()
        status, retry_after_s = int((await reader.readline() or b"HTTP/1.1 0").split()[1]), None
        while (header := await reader.readline()).strip():
            name, _, value = header.partition(b":")
            if name.lower() == b"retry-after-ms":
                retry_after_s = float(value) / 1000
        if status != 200:
            raise Refused(status, retry_after_s, await reader.read())
        yield reader
    finally:
        writer.close()


async def complete(
    port: int, prompt: Sequence[int], num_new: int, note: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Return llama-server's last message for a greedy completion that ignores end-of-text tokens.

    With `note`, the completion is streamed, and `note` is called with each event that contains tokens. Raises
    RuntimeError if the server refuses the request or stops early.
    """
    body = {"prompt": list(prompt), "n_predict": num_new, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
    last: dict[str, Any] = {}
    async with _post(port, "/completion", {**body, "stream": note is not None}) as reader:
        if note is None:
            last = json.loads(await reader.read())
        else:
            while raw := await reader.readline():
                if raw.startswith(b"data: "):
                    last = json.loads(raw[6:])
                    if last.get("tokens"):
                        note()
    if last.get("tokens_predicted") != num_new:
        raise RuntimeError(f"llama-server generated {last.get('tokens_predicted')} tokens instead of {num_new}: {last}")
    return last


async def openai_events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed reply of an OpenAI-compatible API.

    Raises Refused, and RuntimeError if the server reports an error or stops early.
    """
    is_finished = False
    async with _post(port, path, body) as reader:
        while raw := await reader.readline():  # lines with the sizes of chunks do not begin with `data: `
            if raw.startswith(b"data: [DONE]") and is_finished:
                return
            if raw.startswith(b"data: {"):
                event = json.loads(raw[6:])
                if "error" in event:
                    raise RuntimeError(f"the stream failed: {event}")
                is_finished |= any(choice.get("finish_reason") for choice in event["choices"])
                yield event
    raise RuntimeError("a stream ended early")


async def complete_openai(
    port: int, model: str, prompt: str | Sequence[int], num_new: int, note: Callable[[], None], **params: Any
) -> tuple[str, str]:
    """Return the id and the text of a streamed greedy completion. `note` is called with each piece of text.

    `params` are further parameters of the request. Raises Refused, and RuntimeError if the server stops early.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": num_new, "temperature": 0, "stream": True, **params}
    identity = ""
    texts: list[str] = []
    async for event in openai_events(port, "/v1/completions", body):
        identity = event["id"]
        for choice in event["choices"]:
            if choice["text"]:
                texts.append(choice["text"])
                note()
    return identity, "".join(texts)

"""A streamed completion of any server that speaks OpenAI's API, with as little work for the client as may be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

_LONGEST_LINE = 1 << 20  # bytes


async def complete(port: int, model: str, prompt: str, num_new: int, note: Callable[[], None]) -> tuple[str, str, str]:
    """The id, the text and the finish reason of a greedy completion; `note` is called with each piece of text.

    Raises RuntimeError when the server refuses, or ends early.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": num_new, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LONGEST_LINE)
    try:
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        status = (await reader.readline()).split()[1:2]
        while (await reader.readline()).strip():
            pass
        if status != [b"200"]:
            raise RuntimeError(f"the server answered {status}: {(await reader.read())[:200]!r}")
        return await _read(reader, note)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, note: Callable[[], None]) -> tuple[str, str, str]:
    """The lines of chunks' sizes begin with no `data: `."""
    identity, reason = "", ""
    texts: list[str] = []
    while raw := await reader.readline():
        if raw.startswith(b"data: [DONE]"):
            if not reason:
                break
            return identity, "".join(texts), reason
        if raw.startswith(b"data: "):
            event = json.loads(raw[6:])
            if "error" in event:
                raise RuntimeError(f"the stream failed: {event}")
            identity = event["id"]
            for choice in event["choices"]:
                reason = choice.get("finish_reason") or reason
                if choice["text"]:
                    texts.append(choice["text"])
                    note()
    raise RuntimeError(f"a stream ended early, after {len(texts)} pieces of text")

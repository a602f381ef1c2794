"""An asynchronous client of llama-server: a connection per request, because the server closes kept ones under load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

_LONGEST_LINE = 1 << 24  # bytes; an event of a long prompt's end repeats its settings


async def complete(
    port: int, prompt: Sequence[int], num_new: int, note: Callable[[], None] | None = None
) -> dict[str, Any]:
    """The last (with `note`: streamed, and noted event by event) message for a greedy completion past any end mark.

    Raises RuntimeError when the server refuses, or ends early.
    """
    body = {"prompt": list(prompt), "n_predict": num_new, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
    data = json.dumps({**body, "stream": note is not None}).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LONGEST_LINE)
    try:
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        await writer.drain()
        status = (await reader.readline()).split()[1:2]
        while (await reader.readline()).strip():
            pass
        if status != [b"200"]:
            raise RuntimeError(f"llama-server answered {status}: {(await reader.read())[:200]!r}")
        last = await _events(reader, note) if note else json.loads(await reader.read())
    finally:
        writer.close()
    if last.get("tokens_predicted") != num_new:
        raise RuntimeError(f"llama-server generated {last.get('tokens_predicted')} tokens, not {num_new}: {last}")
    return dict(last)


async def _events(reader: asyncio.StreamReader, note: Callable[[], None]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    while raw := await reader.readline():
        if raw.startswith(b"data: "):
            last = json.loads(raw[6:])
            if last.get("tokens"):
                note()
    return last

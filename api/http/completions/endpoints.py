"""The endpoints of completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.client.async_client import AsyncJob
from cellama.api.http.asking import Asked, read
from cellama.api.http.errors import ApiError, of_job, of_worker, wrong
from cellama.api.http.leaving import unless_gone
from cellama.api.http.running import Placed, Running
from cellama.api.http.sse import DONE, KEEP_ALIVE, frame
from cellama.api.openai.answers import body_of
from cellama.api.openai.chunks import Chunks, reasoning_tokens_of
from cellama.api.openai.parameters import CHAT, COMPLETIONS
from cellama.tasks.contract.errors import InvalidJob, JobError

from .orders import Order, order_of, rules_for

PREFIXES = {"chat": "chatcmpl", "generate": "cmpl"}


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions"""
    return await _answer(await read(request), CHAT)


async def complete(request: Request) -> Response:
    """POST /v1/completions"""
    return await _answer(await read(request), COMPLETIONS)


async def _answer(asked: Asked, url: str) -> Response:
    model = await asked.gateway.directory.find(asked.caller, asked.body.get("model"))
    order = await asked.read_by(order_of, asked, url, model)
    in_words = partial(of_worker, url=url, rules=rules_for(asked.body, url))
    async with Running(asked, order.model, order.tier, in_words=in_words) as running:
        await unless_gone(asked.request, _submit(running, order))
        if order.is_stream:
            return await _stream(running, order)
        answer = await unless_gone(asked.request, _whole(running, order))
        return JSONResponse(answer, headers=running.headers_for(answer))


async def _submit(running: Running, order: Order) -> None:
    client = running.asked.gateway.client
    submit: Any = client.chat if order.kind == "chat" else client.generate
    try:
        await running.admit(order.num_tokens, order.num_jobs)
        await running.submit(*(_call(submit, order, content) for content in order.contents))
    except InvalidJob as error:
        raise wrong(order.url, error, rules_for(running.asked.body, order.url)) from None


def _call(submit: Any, order: Order, content: Any) -> Callable[[str | None], Awaitable[AsyncJob[Any]]]:
    return lambda key: submit(order.model, content, wait=True, idempotency_key=key, **order.params)


async def _whole(running: Running, order: Order) -> dict[str, Any]:
    """The body of an answer that comes all at once."""
    reasoning_tokens = 0
    with running.without_events():
        async with aclosing(running.events()) as events:
            async for _, event in events:
                reasoning_tokens += reasoning_tokens_of(event)
    results: Any = [await running.result(place) for place in range(len(running.jobs))]
    answer = body_of(order.kind, _answer_id(running, order), results, reasoning_tokens)
    return {**answer, "service_tier": order.tier}


async def _stream(running: Running, order: Order) -> Response:
    events = running.events(running.asked.gateway.settings.gateway_keepalive_s)
    first = await running.first_of(events)
    return running.stream_of(_frames(running, order, first, events), events)


async def _frames(
    running: Running, order: Order, first: Placed, events: AsyncGenerator[Placed, None]
) -> AsyncGenerator[bytes, None]:
    shown = {"service_tier": order.tier}
    chunks = Chunks(
        order.kind,
        _answer_id(running, order),
        order.model,
        order.n,
        include_usage=order.include_usage,
        shown=shown,
    )
    try:
        yield await _frames_of(running, chunks, first)
        async for placed in events:
            yield await _frames_of(running, chunks, placed)
    except ApiError as error:
        yield frame(error.envelope)
        return
    except JobError as error:
        yield frame(of_job(error).envelope)
        return
    yield b"".join(map(frame, chunks.usage())) + DONE


async def _frames_of(running: Running, chunks: Chunks, placed: Placed) -> bytes:
    """What is told of an event; of several choices only the result has all ends."""
    place, event = placed
    if event["type"] == "ping":
        return KEEP_ALIVE
    if event["type"] != "done":
        return b"".join(map(frame, chunks.of(place, event)))
    result: Any = await running.result(place) if chunks.n > 1 else {}
    return b"".join(map(frame, chunks.ends(place, event, result.get("choices", ()))))


def _answer_id(running: Running, order: Order) -> str:
    return f"{PREFIXES[order.kind]}-{running.jobs[0].id}"


ROUTES = (Route(CHAT, chat, methods=["POST"]), Route(COMPLETIONS, complete, methods=["POST"]))

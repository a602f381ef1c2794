"""The endpoints of messages, and errors in Anthropic's envelope."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial, wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.anthropic.answers import envelope, message_of
from cellama.api.anthropic.parameters import COUNT_TOKENS, MESSAGES
from cellama.api.anthropic.stream import PING, MessageStream
from cellama.api.http.asking import read
from cellama.api.http.errors import ApiError, of_job
from cellama.api.http.leaving import unless_gone
from cellama.api.http.running import Placed, Running, run_one
from cellama.api.http.sse import frame
from cellama.api.openai.chunks import reasoning_tokens_of
from cellama.tasks.contract.errors import InvalidJob, JobError

from .orders import Order, count_of, in_our_words, of_worker, order_of, wrong

REQUEST_ID = "request-id"  # Anthropic's clients read this one

Endpoint = Callable[[Request], Awaitable[Response]]


def _in_anthropics_words(endpoint: Endpoint) -> Endpoint:
    """What goes wrong comes in Anthropic's envelope."""

    @wraps(endpoint)
    async def answered(request: Request) -> Response:
        try:
            response = await endpoint(request)
        except ApiError as error:
            response = _failed(request, error)
        except JobError as error:
            response = _failed(request, of_job(error))
        response.headers[REQUEST_ID] = request.state.request_id
        return response

    return answered


def _failed(request: Request, error: ApiError) -> Response:
    return JSONResponse(_envelope(request, error), error.status, error.headers)


def _envelope(request: Request, error: ApiError) -> dict[str, Any]:
    return envelope(error.status, error.message, request.state.request_id, error.code)


@_in_anthropics_words
async def create(request: Request) -> Response:
    """POST /v1/messages"""
    asked = in_our_words(await read(request))
    model = await asked.gateway.directory.find(asked.caller, asked.body.get("model"))
    order = await asked.read_by(order_of, asked, model)
    in_words = partial(of_worker, body=asked.body)
    async with Running(asked, order.model, order.tier, in_words=in_words) as running:
        await unless_gone(request, _submit(running, order))
        if order.is_stream:
            return await _stream(running, order)
        answer = await unless_gone(request, _whole(running, order))
        return JSONResponse(answer, headers=running.headers_for(answer))


@_in_anthropics_words
async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens: a job of the caller's highest priority, which takes no slot."""
    asked = in_our_words(await read(request))
    model = await asked.gateway.directory.find(asked.caller, asked.body.get("model"))
    name, client = asked.name_of(model), asked.gateway.client
    order, num_tokens = await asked.read_by(count_of, asked)
    submit: Any = client.apply_chat_template
    first = {"wait": True, "priority": asked.caller.light_priority}
    try:
        result, headers = await run_one(
            asked,
            name,
            num_tokens,
            lambda key: submit(name, order.messages, idempotency_key=key, **first, **order.params),
            has_usage=False,
        )
    except InvalidJob as error:
        raise wrong(error, asked.body) from None
    return JSONResponse({"input_tokens": len(result["tokens"])}, headers=headers)


async def _submit(running: Running, order: Order) -> None:
    submit: Any = running.asked.gateway.client.chat
    try:
        await running.admit(order.num_tokens)
        await running.submit(
            lambda key: submit(order.model, order.messages, wait=True, idempotency_key=key, **order.params)
        )
    except InvalidJob as error:
        raise wrong(error, running.asked.body) from None


async def _whole(running: Running, order: Order) -> dict[str, Any]:
    """The body of an answer that comes all at once."""
    thinking_tokens = 0
    with running.without_events():
        async with aclosing(running.events()) as events:
            async for _, event in events:
                thinking_tokens += reasoning_tokens_of(event)
    result: Any = await running.result()
    return message_of(
        _message_id(running),
        result,
        max_tokens=order.max_tokens,
        tier=order.tier,
        thinking_tokens=thinking_tokens,
        shows_thoughts=order.shows_thoughts,
    )


async def _stream(running: Running, order: Order) -> Response:
    events = running.events(running.asked.gateway.settings.gateway_keepalive_s)
    first = await running.first_of(events)
    return running.stream_of(_frames(running, order, first, events), events)


async def _frames(
    running: Running, order: Order, first: Placed, events: AsyncGenerator[Placed, None]
) -> AsyncGenerator[bytes, None]:
    told = MessageStream(
        _message_id(running), order.model, order.tier, order.max_tokens, shows_thoughts=order.shows_thoughts
    )
    try:
        yield _frames_of(told, first)
        async for placed in events:
            yield _frames_of(told, placed)
    except ApiError as error:
        yield frame(_envelope(running.asked.request, error), "error")
    except JobError as error:
        yield frame(_envelope(running.asked.request, of_job(error)), "error")


def _frames_of(told: MessageStream, placed: Placed) -> bytes:
    _, event = placed
    shown = [PING] if event["type"] == "ping" else told.of(event)
    return b"".join(frame(one, one["type"]) for one in shown)


def _message_id(running: Running) -> str:
    return f"msg_{running.jobs[0].id}"


ROUTES = (
    Route(MESSAGES, create, methods=["POST"]),
    Route(COUNT_TOKENS, count_tokens, methods=["POST"]),
)

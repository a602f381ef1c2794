"""A new response: its record, its job, and its first answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from cellama.api.client.async_client import AsyncJob
from cellama.api.http.asking import Asked
from cellama.api.http.errors import ApiError, of_code, of_worker
from cellama.api.http.leaving import unless_gone
from cellama.api.http.running import Placed, Running
from cellama.api.openai.responses.events import Fold
from cellama.api.openai.responses.parameters import RESPONSES
from cellama.api.openai.responses.record import Record
from cellama.tasks.contract.errors import InvalidJob, StreamTrimmed, UnknownJob

from .conversation import messages_for
from .orders import Order, order_of, refused, rules_for
from .records import Records
from .standing import look
from .streaming import Events, frames


async def answer(asked: Asked) -> Response:
    """What POST is answered with. Raises ApiError, JobError, ClientDisconnect."""
    records = Records(asked.gateway)
    order = await unless_gone(asked.request, _ordered(asked, records))
    in_words = partial(of_worker, url=RESPONSES, rules=rules_for(asked.body))
    async with Running(asked, order.record.model, order.tier, in_words=in_words) as running:
        record = await unless_gone(asked.request, _submit(running, order, records))
        if order.is_stream:
            return await _stream(running, record)
        answer = await unless_gone(asked.request, _object(running, record))
        return JSONResponse(answer, headers=running.headers_for(answer))


async def _ordered(asked: Asked, records: Records) -> Order:
    model = await asked.gateway.directory.find(asked.caller, asked.body.get("model"))
    return await order_of(asked, model, records)


async def _submit(running: Running, order: Order, records: Records) -> Record:
    """The record, then the job; of an idempotency key that was used before they are those of then."""
    asked, record = running.asked, order.record
    await running.admit(order.num_tokens)
    if record.store or asked.idempotency_key is not None:
        record = await records.create(record, asked.caller)
    is_new = record is order.record
    try:
        messages = await messages_for(asked, records, record)
        if record.background:
            await records.heed(record, asked.caller)
        await running.submit(lambda _: _chat(asked, record, messages))
    except InvalidJob as error:
        if is_new:
            await records.withdraw(record)
        raise refused(error, asked.body) from None
    except ApiError:  # a queue that is too long: the job is cancelled, and no client knows the id
        if is_new and not running.is_kept:
            await records.withdraw(record)
        raise
    running.is_kept |= record.background  # from now on: a request that was refused leaves no job behind
    return record


async def _chat(asked: Asked, record: Record, messages: list[dict[str, Any]]) -> AsyncJob[Any]:
    """The id of the response is the job's key: however often it is queued, there is one."""
    params: dict[str, Any] = dict(record.params)
    if record.parent_key is not None:
        params["parent_key"] = record.parent_key
    chat: Any = asked.gateway.client.chat
    job: AsyncJob[Any] = await chat(record.model, messages, wait=True, idempotency_key=record.id, **params)
    return job


async def _object(running: Running, record: Record) -> dict[str, Any]:
    gateway = running.asked.gateway
    if record.background:
        return (await look(gateway, record)).response
    fold = Fold(record)
    try:
        async with aclosing(running.events()) as events:
            async for _, event in events:
                fold.of(event)
    except (StreamTrimmed, UnknownJob):
        if not running.is_kept:  # a result outlives its events: an idempotency key may ask for it a day later
            raise
        return (await look(gateway, record)).response
    return fold.response()


async def _stream(running: Running, record: Record) -> Response:
    """The status is that of the first event: what a worker finds wrong at once is no stream, unless it goes on in the
    background, where it can be read again."""
    placed = running.told(running.asked.gateway.settings.gateway_keepalive_s)
    first = None
    if not record.background:
        first = await running.first_of(placed)
        if (event := first[1])["type"] == "error":
            failure = of_code(event["code"], event["message"], retryable=event["retryable"])
            raise await running.failed(failure)
    return running.stream_of(frames(record, _events(placed, first)), placed)


async def _events(placed: AsyncGenerator[Placed, None], first: Placed | None) -> Events:
    if first is not None:
        yield first[1]
    async for _, event in placed:
        yield event

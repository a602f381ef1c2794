"""Create a response. Parse the request, store the record, queue the job, and return the first HTTP answer."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response

from cellama.api.client.async_client import AsyncJob
from cellama.api.http.errors import ApiError, wrong
from cellama.api.http.parsing import ParsedRequest, count, flag, rest_of_context, tokens_of, within_limit
from cellama.api.http.running import IndexedEvent, RunningJobs, unless_disconnected
from cellama.api.openai.parameters import callers_names
from cellama.api.openai.responses.bodies import includes_signatures, params_of, response_fields
from cellama.api.openai.responses.events import ResponseEvents
from cellama.api.openai.responses.items import items_of, messages_of
from cellama.api.openai.responses.parameters import RULES
from cellama.api.openai.responses.record import ResponseRecord
from cellama.config.logging import event_logger
from cellama.tasks.contract.errors import InvalidJob, StreamTrimmed, UnknownJob
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.kinds.chat import TASK_CHAT
from cellama.tasks.contract.names import job_id_of_key
from cellama.tasks.contract.shapes.workers import ModelView

from .reading import Events, ResponseStatus, error_frame, frames, status_of
from .store import ResponseStore, digest_of, new_id

log = event_logger(__name__)

MAX_TURNS = 200  # maximum responses to build a conversation from, because each takes two round trips to Redis
_CONTEXT_PARAMETERS = ("cache_scope", "adapters", "tools", "template_args", "enable_thinking")
_FIELD = "previous_response_id"
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_\d+")  # contains the id of the response that stores the item


@dataclass(frozen=True, slots=True)
class Previous:
    """A response that a new response continues. `has_context` is True while Redis stores the context's tokens."""

    record: ResponseRecord
    status: ResponseStatus
    has_context: bool = False

    def key_for(
        self, model: str, params: dict[str, Any], instructions: str | None, items: list[dict[str, Any]]
    ) -> str | None:
        """Return the `parent_key` for a continuation, or None if the new response would have a different context.

        Only a user message can continue a context. Many chat templates reject tool results without their calls, and
        system messages within a conversation.
        """
        record = self.record
        is_same = self.has_context and self.status.response["status"] == "completed"
        is_same &= record.model == model and record.shown["instructions"] == instructions
        is_same &= items[0].get("role") == "user"
        is_same &= all(record.params.get(name) == params.get(name) for name in _CONTEXT_PARAMETERS)
        return self.status.finish_key if is_same else None


async def previous_of(parsed: ParsedRequest, records: ResponseStore) -> Previous | None:
    """Return the response with the id `previous_response_id`, or None. Raises ApiError."""
    response_id = parsed.body.get(_FIELD)
    if response_id is None:
        return None
    if not isinstance(response_id, str):
        raise ApiError(400, f"{_FIELD} is {shorten(response_id)}; it must be the id of a response", param=_FIELD)
    found = await _finished(parsed, records, response_id)
    return replace(found, has_context=await records.has_context(found.status.finish_key))


async def _finished(parsed: ParsedRequest, records: ResponseStore, response_id: str) -> Previous:
    try:
        record = await records.read(response_id, parsed.caller)
        status = await status_of(parsed.gateway, record)
    except ApiError as error:
        if error.status != 404:
            raise
        message = f"{_FIELD}: {error.message}; send the whole conversation as input"
        raise ApiError(404, message, code="previous_response_not_found", param=_FIELD) from None
    if not status.has_ended or status.response["status"] == "failed":
        raise ApiError(
            400,
            f"{_FIELD}: {response_id!r} is {status.response['status']}; continue a response that has finished",
            param=_FIELD,
        )
    return Previous(record, status)


async def messages_for(parsed: ParsedRequest, records: ResponseStore, record: ResponseRecord) -> list[dict[str, Any]]:
    """Return the job's messages. Raises ApiError."""
    if record.parent_key is not None:
        return messages_of(record.items)
    items = [*await items_before(parsed, records, record.previous), *record.items]
    return with_instructions(record.shown["instructions"], messages_of(items))


async def items_before(parsed: ParsedRequest, records: ResponseStore, previous: str | None) -> list[dict[str, Any]]:
    """Return the items of the response `previous` and of all responses before it. Raises ApiError."""
    items: list[dict[str, Any]] = []
    at, num_turns = previous, 0
    while at is not None:
        num_turns += 1
        if num_turns > MAX_TURNS:
            raise ApiError(
                400,
                f"{_FIELD}: the conversation has more than {MAX_TURNS} responses, and its context can't be reused, "
                "for example because the instructions, tools or model have changed; send the conversation as input",
                param=_FIELD,
            )
        found = await _finished(parsed, records, at)
        items = [*found.record.items, *found.status.response["output"], *items]
        at = found.record.previous
    return items


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the instructions into one system message at the start. Many chat templates reject a second system message."""
    if instructions is None:
        return messages
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{instructions}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A parsed request for a response."""

    record: ResponseRecord
    tier: str
    is_stream: bool
    num_tokens: int  # estimate of the tokens that it prefills and generates


async def parse_response(parsed: ParsedRequest, model: ModelView, records: ResponseStore) -> NewResponse:
    """Parse a body. The job's payload validates the other parameters. Raises ApiError."""
    body = {name: value for name, value in parsed.body.items() if name != "cache_salt"}
    is_stream, background = flag(body, "stream"), flag(body, "background")
    store, tier = flag(body, "store", default=True), parsed.tier()
    if background and not store:
        raise ApiError(400, "background requires store: true; set store, or remove background", param="background")
    if body.get("input") is None:
        raise ApiError(400, "input is missing; send a string or a list of items", param="input")
    response_id = new_id(parsed.idempotency_key)
    body["input"] = await _without_references(parsed, records)
    parsed_body = await parsed.read_by(_parse_body, body, response_id, model.get("sampling", {}))
    params, shown, items = parsed_body.params, parsed_body.shown, parsed_body.items
    previous, scope = await previous_of(parsed, records), parsed.scope()
    params |= {"stream": is_stream or background, **parsed.params_of_caller()}
    prompt_tokens = 0 if previous is None else previous.status.response["usage"]["total_tokens"]
    params.setdefault("max_tokens", within_limit(parsed.caller.max_tokens, rest_of_context(model, params)))
    name = parsed.name_of(model)
    parent = previous if model.get("follows_replies", True) else None
    record = ResponseRecord(
        id=response_id,
        tenant=parsed.caller.tenant,
        job_id=job_id_of_key(TASK_CHAT, scope, response_id),
        digest=await parsed.read_by(digest_of, parsed.body),
        created_at=int(time.time()),
        model=name,
        items=items,
        params=params,
        shown={**shown, "model": model["id"], "service_tier": tier},
        previous=None if previous is None else previous.record.id,
        parent_key=None if parent is None else parent.key_for(name, params, shown["instructions"], items),
        background=background,
        store=store,
        shows_signatures=parsed_body.shows_signatures,
    )
    prompt_tokens += parsed_body.num_tokens
    num_tokens = prompt_tokens + count(params["max_tokens"], 1)
    return NewResponse(record=record, tier=tier, is_stream=is_stream, num_tokens=num_tokens)


async def _without_references(parsed: ParsedRequest, records: ResponseStore) -> Any:
    """Return the input with all references to items of stored responses replaced by these items. Raises ApiError."""
    given, stored, num_read = parsed.body["input"], dict[str, dict[str, Any]](), 0
    if not isinstance(given, list):
        return given
    items = []
    for index, item in enumerate(given):
        if not isinstance(item, dict) or item.get("type") != "item_reference":
            items.append(item)
            continue
        item_id = item.get("id")
        if not isinstance(item_id, str):
            raise ApiError(400, f"input[{index}].id is {shorten(item_id)}; it must be a string", param="input")
        if item_id not in stored:
            num_read += 1
            if num_read > MAX_TURNS:
                raise ApiError(
                    400, f"input refers to items from more than {MAX_TURNS} responses; send the items", param="input"
                )
            stored |= {one["id"]: one for one in await _items_beside(parsed, records, item_id)}
        if item_id not in stored:
            raise ApiError(
                404,
                f"input[{index}].id is {shorten(item_id)}, which is not the id of a stored response's item; send "
                "the item itself",
                param="input",
            )
        items.append(stored[item_id])
    return items


async def _items_beside(parsed: ParsedRequest, records: ResponseStore, item_id: str) -> list[dict[str, Any]]:
    """Return the items of the stored response that contains this item, or an empty list. Raises ApiError."""
    match = _ITEM_ID.fullmatch(item_id)
    if match is None:
        return []
    try:
        record = await records.read(f"resp_{match[1]}", parsed.caller)
        status = await status_of(parsed.gateway, record)
    except ApiError as error:
        if error.status != 404:
            raise
        return []
    return [*record.items, *status.response["output"]]


@dataclass(frozen=True, slots=True)
class _ParsedBody:
    """The parsed parts of a body, and the body's estimated number of tokens."""

    params: dict[str, Any]
    shown: dict[str, Any]
    items: list[dict[str, Any]]
    shows_signatures: bool
    num_tokens: int


def _parse_body(body: Mapping[str, Any], response_id: str, defaults: Mapping[str, Any]) -> _ParsedBody:
    """Parse a body, but not the conversation that it continues.

    `defaults` contains the model's sampling parameters. Raises ApiError.
    """
    try:
        params, shown = params_of(body), response_fields(body, defaults)
        items, shows_signatures = items_of(body["input"], response_id), includes_signatures(body)
    except InvalidJob as error:
        raise wrong(error, callers_names(RULES, body)) from None
    return _ParsedBody(
        params=params,
        shown=shown,
        items=items,
        shows_signatures=shows_signatures,
        num_tokens=tokens_of(items, shown["instructions"] or ""),
    )


async def answer(parsed: ParsedRequest) -> Response:
    """Create a response, and return the HTTP answer to the POST request.

    Raises ApiError, JobError and ClientDisconnect.
    """
    records = ResponseStore(parsed.gateway)
    new = await unless_disconnected(parsed.request, _parse_for_model(parsed, records))
    for warning in new.record.shown.get("warnings", ()):
        _log_once(warning)
    names = callers_names(RULES, parsed.body)
    async with RunningJobs(parsed, new.record.model, new.tier, names=names) as running:
        record = await unless_disconnected(parsed.request, _submit(running, new, records))
        if new.is_stream:
            return await _stream(running, record)
        return running.answer(await unless_disconnected(parsed.request, _object(running, record)))


@functools.lru_cache(maxsize=64)  # agents send the same tools with every request
def _log_once(warning: str) -> None:
    log.warning("unsupported part of request ignored", detail=warning)


async def _parse_for_model(parsed: ParsedRequest, records: ResponseStore) -> NewResponse:
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model"))
    return await parse_response(parsed, model, records)


async def _submit(running: RunningJobs, new: NewResponse, records: ResponseStore) -> ResponseRecord:
    """Store the record, then queue the job.

    If the idempotency key is repeated, return the first request's record.
    """
    parsed, record = running.parsed, new.record
    await running.admit(new.num_tokens)
    if record.store or parsed.idempotency_key is not None:
        record = await records.create(record)
    is_new = record is new.record
    try:
        messages = await messages_for(parsed, records, record)
        if record.background:
            await records.notify_on_end(record)
        await running.submit(lambda _: _chat(parsed, record, messages))
    except InvalidJob as error:
        if is_new:
            await records.withdraw(record)
        raise wrong(error, running.names) from None
    except ApiError:  # the queue is too long, so the job is cancelled, and the client never got the id
        if is_new and not running.survives_disconnect:
            await records.withdraw(record)
        raise
    running.survives_disconnect |= record.background  # set last, so that a rejected request leaves no job behind
    return record


async def _chat(parsed: ParsedRequest, record: ResponseRecord, messages: list[dict[str, Any]]) -> AsyncJob[Any]:
    """Queue the job. The response's id is the job's idempotency key, so only one job is queued per response."""
    params: dict[str, Any] = dict(record.params)
    if record.parent_key is not None:
        params["parent_key"] = record.parent_key
    chat: Any = parsed.gateway.client.chat
    job: AsyncJob[Any] = await chat(record.model, messages, wait=True, idempotency_key=record.id, **params)
    return job


async def _object(running: RunningJobs, record: ResponseRecord) -> dict[str, Any]:
    gateway = running.parsed.gateway
    if record.background:
        return (await status_of(gateway, record)).response
    response_events = ResponseEvents(record)
    try:
        async with aclosing(running.events()) as events:
            async for _, event in events:
                response_events.of(event)
    except (StreamTrimmed, UnknownJob):
        if not running.survives_disconnect:  # a result outlives its events, so an idempotency key still returns it
            raise
        return (await status_of(gateway, record)).response
    return response_events.response()


async def _stream(running: RunningJobs, record: ResponseRecord) -> Response:
    """Stream a new response.

    A background response doesn't wait for its first event because errors can be read later.
    """

    async def events_of(indexed: AsyncGenerator[IndexedEvent, None]) -> Events:
        async for _, event in indexed:
            yield event

    def frames_of(indexed: AsyncGenerator[IndexedEvent, None]) -> AsyncGenerator[bytes, None]:
        return frames(record, events_of(indexed), wait_of=running.parsed.gateway.wait_of)

    return await running.stream(frames_of, error_frame, waits=not record.background, with_failures=True)

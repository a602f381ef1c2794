"""A new response: what it is asked, its record, its job, and its first answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import Response

from cellama.api.client.async_client import AsyncJob
from cellama.api.http.errors import ApiError, wrong
from cellama.api.http.parsing import ParsedRequest, count, flag, rest_of_context, tokens_of, within_limit
from cellama.api.http.running import Placed, RunningJobs, unless_gone
from cellama.api.openai.parameters import callers_names
from cellama.api.openai.responses.bodies import params_of, shown_of, wants_encrypted
from cellama.api.openai.responses.events import Fold
from cellama.api.openai.responses.items import items_of, messages_of
from cellama.api.openai.responses.parameters import RULES
from cellama.api.openai.responses.record import ResponseRecord
from cellama.tasks.contract.errors import InvalidJob, StreamTrimmed, UnknownJob
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.kinds.chat import TASK_CHAT
from cellama.tasks.contract.names import job_id_of_key
from cellama.tasks.contract.shapes.workers import ModelView

from .reading import Events, Standing, error_frame, frames, look
from .store import ResponseStore, digest_of, new_id

MAX_TURNS = 200  # responses that a conversation is built from: each takes two round trips to Redis
_OF_THE_CONTEXT = ("cache_scope", "adapters", "tools", "template_args", "enable_thinking")
_FIELD = "previous_response_id"


@dataclass(frozen=True, slots=True)
class Previous:
    """A response that another one follows. `has_context` says whether Redis has the tokens of its context, still."""

    record: ResponseRecord
    standing: Standing
    has_context: bool = False

    def key_for(
        self, model: str, params: dict[str, Any], instructions: str | None, items: list[dict[str, Any]]
    ) -> str | None:
        """The `parent_key` of what follows, if that would read the very same context. Only a user's words follow one:
        many chat templates refuse answers of tools without their calls, or a system message in the midst."""
        mine, alike = self.record, self.has_context and self.standing.response["status"] == "completed"
        alike &= mine.model == model and mine.shown["instructions"] == instructions
        alike &= items[0].get("role") == "user"
        alike &= all(mine.params.get(name) == params.get(name) for name in _OF_THE_CONTEXT)
        return self.standing.finish_key if alike else None


async def previous_of(parsed: ParsedRequest, records: ResponseStore) -> Previous | None:
    """The response that the body names. Raises ApiError."""
    wanted = parsed.body.get(_FIELD)
    if wanted is None:
        return None
    if not isinstance(wanted, str):
        raise ApiError(400, f"{_FIELD} is {shorten(wanted)}; it must be the id of a response", param=_FIELD)
    found = await _ended(parsed, records, wanted)
    return replace(found, has_context=await records.has_context(found.standing.finish_key))


async def _ended(parsed: ParsedRequest, records: ResponseStore, response_id: str) -> Previous:
    try:
        record = await records.read(response_id, parsed.caller)
        standing = await look(parsed.gateway, record)
    except ApiError as error:
        if error.status != 404:
            raise
        message = f"{_FIELD}: {error.message}; send the whole conversation as input"
        raise ApiError(404, message, code="previous_response_not_found", param=_FIELD) from None
    if not standing.has_ended or standing.response["status"] == "failed":
        status = standing.response["status"]
        raise ApiError(
            400, f"{_FIELD} is {response_id!r}, which is {status}; go on after one that has ended well", param=_FIELD
        )
    return Previous(record, standing)


async def messages_for(parsed: ParsedRequest, records: ResponseStore, record: ResponseRecord) -> list[dict[str, Any]]:
    """The messages of the job. Raises ApiError."""
    items = list(record.items)
    if record.parent_key is not None:
        return messages_of(items)
    at, num_turns = record.previous, 0
    while at is not None:
        num_turns += 1
        if num_turns > MAX_TURNS:
            raise ApiError(
                400,
                f"more than {MAX_TURNS} responses come before this one, and instructions, tools or model are others "
                "now: send the conversation as input",
                param=_FIELD,
            )
        previous = await _ended(parsed, records, at)
        items = [*previous.record.items, *previous.standing.response["output"], *items]
        at = previous.record.previous
    return _with_instructions(record.shown["instructions"], messages_of(items))


def _with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message at the head: many chat templates take no second one."""
    if instructions is None:
        return messages
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{instructions}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


@dataclass(frozen=True, slots=True)
class NewResponse:
    """A request for a response."""

    record: ResponseRecord
    tier: str
    is_stream: bool
    num_tokens: int  # that it may read and generate, about


async def parse_response(parsed: ParsedRequest, model: ModelView, records: ResponseStore) -> NewResponse:
    """Return the response that a body asks for. The payload of its job checks the rest. Raises ApiError."""
    body = {name: value for name, value in parsed.body.items() if name != "cache_salt"}
    is_stream, background = flag(body, "stream"), flag(body, "background")
    store, tier = flag(body, "store", default=True), parsed.tier()
    if background and not store:
        raise ApiError(400, "background is true, and store false; what goes on must be stored", param="background")
    if body.get("input") is None:
        raise ApiError(400, "input is missing; send a text or a list of items", param="input")
    response_id = new_id(parsed.idempotency_key)
    own = await parsed.read_by(_parse_body, body, response_id)
    params, shown, items = own.params, own.shown, own.items
    previous, scope = await previous_of(parsed, records), parsed.scope()
    params |= {"stream": is_stream or background, **parsed.params_of_caller()}
    num_read = 0 if previous is None else previous.standing.response["usage"]["total_tokens"]
    params.setdefault("max_tokens", within_limit(parsed.caller.max_tokens, rest_of_context(model, params)))
    name = parsed.name_of(model)
    goes_on = previous if model.get("follows_replies", True) else None
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
        parent_key=None if goes_on is None else goes_on.key_for(name, params, shown["instructions"], items),
        background=background,
        store=store,
        shows_signatures=own.shows_signatures,
    )
    num_read += own.num_tokens
    num_tokens = num_read + count(params["max_tokens"], 1)
    return NewResponse(record=record, tier=tier, is_stream=is_stream, num_tokens=num_tokens)


@dataclass(frozen=True, slots=True)
class _ParsedBody:
    """What a body says by itself, and about how many tokens it has."""

    params: dict[str, Any]
    shown: dict[str, Any]
    items: list[dict[str, Any]]
    shows_signatures: bool
    num_tokens: int


def _parse_body(body: Mapping[str, Any], response_id: str) -> _ParsedBody:
    """Raises ApiError."""
    try:
        params, shown = params_of(body), shown_of(body)
        items, shows_signatures = items_of(body["input"], response_id), wants_encrypted(body)
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
    """What POST is answered with. Raises ApiError, JobError, ClientDisconnect."""
    records = ResponseStore(parsed.gateway)
    new = await unless_gone(parsed.request, _parse_for_model(parsed, records))
    names = callers_names(RULES, parsed.body)
    async with RunningJobs(parsed, new.record.model, new.tier, names=names) as running:
        record = await unless_gone(parsed.request, _submit(running, new, records))
        if new.is_stream:
            return await _stream(running, record)
        return running.answer(await unless_gone(parsed.request, _object(running, record)))


async def _parse_for_model(parsed: ParsedRequest, records: ResponseStore) -> NewResponse:
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model"))
    return await parse_response(parsed, model, records)


async def _submit(running: RunningJobs, new: NewResponse, records: ResponseStore) -> ResponseRecord:
    """The record, then the job; of an idempotency key that was used before they are those of then."""
    parsed, record = running.parsed, new.record
    await running.admit(new.num_tokens)
    if record.store or parsed.idempotency_key is not None:
        record = await records.create(record)
    is_new = record is new.record
    try:
        messages = await messages_for(parsed, records, record)
        if record.background:
            await records.heed(record)
        await running.submit(lambda _: _chat(parsed, record, messages))
    except InvalidJob as error:
        if is_new:
            await records.withdraw(record)
        raise wrong(error, running.names) from None
    except ApiError:  # a queue that is too long: the job is cancelled, and no client knows the id
        if is_new and not running.is_kept:
            await records.withdraw(record)
        raise
    running.is_kept |= record.background  # from now on: a request that was refused leaves no job behind
    return record


async def _chat(parsed: ParsedRequest, record: ResponseRecord, messages: list[dict[str, Any]]) -> AsyncJob[Any]:
    """The id of the response is the job's key: however often it is queued, there is one."""
    params: dict[str, Any] = dict(record.params)
    if record.parent_key is not None:
        params["parent_key"] = record.parent_key
    chat: Any = parsed.gateway.client.chat
    job: AsyncJob[Any] = await chat(record.model, messages, wait=True, idempotency_key=record.id, **params)
    return job


async def _object(running: RunningJobs, record: ResponseRecord) -> dict[str, Any]:
    gateway = running.parsed.gateway
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


async def _stream(running: RunningJobs, record: ResponseRecord) -> Response:
    """A background response doesn't wait for its first event: what a worker finds wrong can be read again."""

    async def events_of(placed: AsyncGenerator[Placed, None]) -> Events:
        async for _, event in placed:
            yield event

    def frames_of(placed: AsyncGenerator[Placed, None]) -> AsyncGenerator[bytes, None]:
        return frames(record, events_of(placed))

    return await running.stream(frames_of, error_frame, waits=not record.background, with_failures=True)

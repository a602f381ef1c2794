"""What a body orders: the record of a response that is not there yet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cellama.api.http.allowance import count, rest_of_context, tokens_of, within_limit
from cellama.api.http.asking import Asked, flag
from cellama.api.http.errors import ApiError, wrong
from cellama.api.openai.parameters import Rule
from cellama.api.openai.responses.bodies import params_of, shown_of, wants_encrypted
from cellama.api.openai.responses.items import items_of
from cellama.api.openai.responses.parameters import RESPONSES, RULES
from cellama.api.openai.responses.record import Record
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.names import TASK_CHAT, job_id_of_key
from cellama.tasks.contract.shapes.workers import ModelView

from .conversation import previous_of
from .records import Records, digest_of, new_id


@dataclass(frozen=True, slots=True)
class Order:
    """A request for a response."""

    record: Record
    tier: str
    is_stream: bool
    num_tokens: int  # that it may read and generate, about


async def order_of(asked: Asked, model: ModelView, records: Records) -> Order:
    """The order of a body, but for what only a job's payload checks. Raises ApiError."""
    body = {name: value for name, value in asked.body.items() if name != "cache_salt"}
    is_stream, background = flag(body, "stream"), flag(body, "background")
    store, tier = flag(body, "store", default=True), asked.tier()
    if background and not store:
        raise ApiError(400, "background is true, and store false; what goes on must be stored", param="background")
    if body.get("input") is None:
        raise ApiError(400, "input is missing; send a text or a list of items", param="input")
    response_id = new_id(asked.idempotency_key)
    told = await asked.read_by(_told, body, response_id)
    params, shown, items = told.params, told.shown, told.items
    previous, scope = await previous_of(asked, records), asked.scope()
    params |= {"stream": is_stream or background, **asked.params_of_caller()}
    num_read = 0 if previous is None else previous.standing.response["usage"]["total_tokens"]
    params.setdefault("max_tokens", within_limit(asked.caller.max_tokens, rest_of_context(model, params)))
    name = asked.name_of(model)
    goes_on = previous if model.get("follows_replies", True) else None
    record = Record(
        id=response_id,
        job_id=job_id_of_key(TASK_CHAT, scope, response_id),
        digest=await asked.read_by(digest_of, asked.body),
        created_at=int(time.time()),
        model=name,
        items=items,
        params=params,
        shown={**shown, "model": model["id"], "service_tier": tier},
        previous=None if previous is None else previous.record.id,
        parent_key=None if goes_on is None else goes_on.key_for(name, params, shown["instructions"], items),
        background=background,
        store=store,
        shows_signatures=told.shows_signatures,
    )
    num_read += told.num_tokens
    return Order(record, tier, is_stream, num_read + count(params["max_tokens"], 1))


@dataclass(frozen=True, slots=True)
class _Told:
    """What a body says by itself, and about how many tokens it has."""

    params: dict[str, Any]
    shown: dict[str, Any]
    items: list[dict[str, Any]]
    shows_signatures: bool
    num_tokens: int


def _told(body: Mapping[str, Any], response_id: str) -> _Told:
    """Raises ApiError."""
    try:
        params, shown = params_of(body), shown_of(body)
        items, shows_signatures = items_of(body["input"], response_id), wants_encrypted(body)
    except InvalidJob as error:
        raise wrong(RESPONSES, error, RULES) from None
    return _Told(params, shown, items, shows_signatures, tokens_of(items, shown["instructions"] or ""))


def refused(error: InvalidJob, body: Mapping[str, Any]) -> ApiError:
    """What the payload of the job says is wrong. It calls things by names that a body may not have itself, or has."""
    return wrong(RESPONSES, error, rules_for(body))


def rules_for(body: Mapping[str, Any]) -> dict[str, Rule]:
    """Return the rules by which this body calls things."""
    return {name: rule for name, rule in RULES.items() if rule.fate != "refused" and rule.to not in body}

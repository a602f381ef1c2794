"""Count a conversation's tokens, or replace a conversation with a summary.

Requests to these endpoints don't store a record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response

from cellama.api.http.errors import ApiError, wrong
from cellama.api.http.parsing import ParsedRequest, check_known, rest_of_context, tokens_of, within_limit
from cellama.api.http.running import run_one
from cellama.api.openai.parameters import callers_names
from cellama.api.openai.responses.bodies import instructions_of, params_of
from cellama.api.openai.responses.events import usage_of
from cellama.api.openai.responses.items import SUMMARY_PREFIX, items_of, messages_of
from cellama.api.openai.responses.parameters import COMPACTED, COUNTED, RULES
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.names import DEFAULT_MODEL

from .creating import items_before, previous_of, with_instructions
from .store import ResponseStore, new_id

MAX_SUMMARY_TOKENS = 2048  # enough for the facts of a long conversation, and small compared with its context
SUMMARY_REQUEST = (
    "Summarize our conversation so far, so that another assistant can continue it from your summary alone. Include the "
    "user's goals and constraints, decisions, names, numbers, file paths, results of tools, and the steps that remain. "
    "Reply with the summary only."
)
_TEMPLATE_PARAMETERS = ("tools", "tool_choice", "enable_thinking", "template_args")


async def count_tokens(parsed: ParsedRequest) -> Response:
    """Return the number of tokens that a response with this body would prefill. Raises ApiError.

    The job has the caller's highest priority because it doesn't need a slot.
    """
    check_known(parsed.body, COUNTED)
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model") or DEFAULT_MODEL)
    name, submit = parsed.name_of(model), _method(parsed, "apply_chat_template")
    messages = with_instructions(_instructions(parsed), messages_of(await _items(parsed)))
    try:
        params = await parsed.read_by(params_of, parsed.body)
        result, headers = await run_one(
            parsed,
            name,
            await parsed.read_by(tokens_of, messages),
            lambda key: submit(
                name,
                messages,
                idempotency_key=key,
                **parsed.light_options,
                **{name: params[name] for name in _TEMPLATE_PARAMETERS if name in params},
            ),
            has_usage=False,
        )
    except InvalidJob as error:
        raise wrong(error, callers_names(RULES, parsed.body)) from None
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(result["tokens"])}, headers=headers)


async def compact(parsed: ParsedRequest) -> Response:
    """Return the user's messages, followed by an item with the model's summary of the conversation. Raises ApiError."""
    check_known(parsed.body, COMPACTED)
    model = await parsed.gateway.find_model(parsed.caller, parsed.body.get("model"))
    name, submit, items = parsed.name_of(model), _method(parsed, "chat"), await _items(parsed)
    request = {"role": "user", "content": SUMMARY_REQUEST}
    messages = [*with_instructions(_instructions(parsed), messages_of(items)), request]
    max_tokens = within_limit(parsed.caller.max_tokens, min(MAX_SUMMARY_TOKENS, rest_of_context(model, {})))
    params = {"max_tokens": max_tokens, "temperature": 0, "enable_thinking": False, **parsed.params_of_caller()}
    num_tokens = await parsed.read_by(tokens_of, messages) + max_tokens
    try:
        result, headers = await run_one(
            parsed, name, num_tokens, lambda key: submit(name, messages, wait=True, idempotency_key=key, **params)
        )
    except InvalidJob as error:
        raise wrong(error, callers_names(RULES, parsed.body)) from None
    response_id = new_id(parsed.idempotency_key)
    summary = {
        "id": response_id.replace("resp_", "cmp_"),
        "type": "compaction",
        "encrypted_content": SUMMARY_PREFIX + result["text"],
    }
    answer = {
        "id": response_id,
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*(item for item in items if item.get("role") == "user"), summary],
        "usage": usage_of(result["usage"], 0),
    }
    return JSONResponse(answer, headers=headers)


def _method(parsed: ParsedRequest, name: str) -> Any:
    return getattr(parsed.gateway.client, name)


async def _items(parsed: ParsedRequest) -> list[dict[str, Any]]:
    """Return all items of the conversation, including the items of previous responses. Raises ApiError."""
    records, given = ResponseStore(parsed.gateway), parsed.body.get("input")
    previous = await previous_of(parsed, records)
    if given is None and previous is None:
        raise ApiError(400, "input is missing; send a string, a list of items, or previous_response_id", param="input")
    before = [] if previous is None else await items_before(parsed, records, previous.record.id)
    return before if given is None else [*before, *await parsed.read_by(_own_items, parsed.body)]


def _own_items(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        return items_of(body["input"], new_id(None))
    except InvalidJob as error:
        raise wrong(error, callers_names(RULES, body)) from None


def _instructions(parsed: ParsedRequest) -> str | None:
    try:
        return instructions_of(parsed.body)
    except InvalidJob as error:
        raise wrong(error, callers_names(RULES, parsed.body)) from None
